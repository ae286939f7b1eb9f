"""Training step, prefill and decoding of every attention type, with as many parameters as the twin."""

from functools import partial

from script import Steps, run
from transformers import PreTrainedModel

from difftransformer.attention import variants
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, count
from difftransformer.model.counts import matching_width
from difftransformer_lab.bench.models import DEFAULT_SIZES, SIZES, WORKS, time_models
from difftransformer_lab.bench.settings import Settings


def steps(settings: Settings) -> Steps:
    """List the work, the sizes and the data types."""
    return {
        f"{work} of {size}, {dtype}": partial(measure, size, dtype, work, settings)
        for work in WORKS
        for size in settings.sizes or DEFAULT_SIZES[settings.device]
        for dtype in settings.dtypes or ()
    }


def measure(size: str, dtype: str, work: str, settings: Settings) -> list:
    """Time a model of each attention type."""
    return time_models(size, dtype, work, settings, build_variants(size), part="variants")


def build_variants(size: str) -> dict[str, PreTrainedModel]:
    """Build a model of each attention type in fp32, with an MLP that makes its parameters those of the twin, to the nearest."""
    models = {}
    for name in variants():
        config = DiffTransformerConfig(**SIZES[size][0], attention_type=name)
        config.intermediate_size = matching_width(config, count(config.twin()).parameters)
        models[name] = DiffTransformerForCausalLM(config)
    return models


if __name__ == "__main__":
    run(steps, __doc__)
