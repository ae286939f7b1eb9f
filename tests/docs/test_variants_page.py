"""The sizes on docs/variants.md are those of the models."""

import re
from pathlib import Path

import pytest

from difftransformer import DiffTransformerConfig
from difftransformer.attention import VARIANTS
from difftransformer.model import count, matching_width, preset

PAGE = (Path(__file__).parents[2] / "docs" / "variants.md").read_text()
SIZES = (
    {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
    preset("830m").fields,
)


KINDS = [name for name, of in VARIANTS.items() if of.__module__.startswith("difftransformer.")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_equal_parameters(kind):
    cells = []
    for fields in SIZES:
        config = DiffTransformerConfig(attention_type=kind, **fields)
        wanted = count(config.twin()).parameters

        def shown(found, wanted=wanted):
            return f"{found:,}" if kind == "softmax" else f"{found:,} ({found / wanted - 1:+.2%})".replace("%", " %")

        first = count(config).parameters
        config.intermediate_size = matching_width(config, wanted)
        assert count(config).parameters == pytest.approx(wanted, rel=0.005)
        cells += [shown(first), f"{config.intermediate_size:,}", shown(count(config).parameters)]
    assert f"| `{kind}` | " + " | ".join(cells) + " |" in PAGE


def test_the_operations_of_the_controls_at_equal_parameters():
    twin = DiffTransformerConfig(attention_type="softmax", **SIZES[1])
    wanted = count(twin, context_tokens=2048)
    rows = re.findall(r"^\| `(\w+)` \| (\d\.\d{3}) \| [\d.]+ to", PAGE, re.M)
    assert {kind for kind, _ in rows} >= set(KINDS[6:])
    for kind, said in rows:
        config = twin.twin(kind)
        config.intermediate_size = matching_width(config, wanted.parameters)
        found = count(config, context_tokens=2048).train_flops_per_token
        assert f"{found / wanted.train_flops_per_token:.3f}" == said
