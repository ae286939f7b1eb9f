"""A pretrained language model made differential, and the proof that it is still the same function."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import ConfigError, DataError, DiffTransformerError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM, count
from ..model.progress import without_progress_bars
from ..results import Drift
from .folder import CONFIG_FILE, Converted, read_config, refuse_used, write_converted
from .llama import CLASSES, from_llama

WINDOW_TOKENS = 512  # of one forward pass


@dataclass(frozen=True, kw_only=True)
class Upcycled:
    """What was written.

    Attributes:
        converted: Folder, files, notes.
        parameters: Of the result.
        added_parameters: Of these, those that the source does not have.
    """

    converted: Converted
    parameters: int
    added_parameters: int


def upcycle_folder(
    source: Path | str,
    target: Path | str,
    *,
    to: str,
    head_norm: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Upcycled:
    """Make a Llama or Mistral differential without changing its function; see `llama.py` for how.

    Args:
        source: A folder with config.json and safetensors.
        target: The folder to make. It may exist if it is empty.
        to: One of `llama.targets()`, such as "diff", or "softmax" for the plain model in this package's layout.
        head_norm: "none" or None: a headwise norm could not keep the function.
        seed: Seed of the random draws.
        **options: Options of the attention type, such as dex_heads for "dex".

    Raises:
        ConfigError: the source is no Llama, has a feature that no model of ours has, or the target folder is in use.
        CheckpointError: files are missing or damaged, or tensors are not those of the configuration.
        ShapeError: a tensor's shape contradicts config.json.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    document = read_config(source)
    at, model_type = source / CONFIG_FILE, document.get("model_type")
    if model_type not in CLASSES:
        raise ConfigError(
            f"{at}: model_type={model_type!r} does not have Llama's layout; expected one of {', '.join(map(repr, CLASSES))}"
        )
    if document.get("quantization_config") is not None:
        raise ConfigError(f"{at}: quantization_config is set, expected none; name the model before it is quantized")
    try:
        plan = from_llama(CLASSES[model_type].from_dict(document), to=to, head_norm=head_norm, seed=seed, **options)
    except DiffTransformerError as error:
        raise ConfigError(f"{at}: {error}") from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        StrictDataclassError,
    ) as error:
        raise ConfigError(f"{at} describes no {model_type} model ({' '.join(str(error).split())})") from None
    converted = write_converted(source, target, plan, str(model_type), to)
    before = sum(math.prod(shape) for name, shape in plan.needs.items() if name not in plan.ties)
    after = count(DiffTransformerConfig(**plan.config)).parameters
    return Upcycled(converted=converted, parameters=after, added_parameters=after - before)


@torch.inference_mode()
def measure_drift(source: Path | str, target: Path | str, ids: Tensor, *, greedy_tokens: int = 64) -> Drift:
    """Run a source and its conversion on the same tokens, in fp32.

    Args:
        source: Folder of a causal language model that transformers opens.
        target: Folder of a model of this package.
        ids: (N,) token ids of a text, N at least 2; read in windows of WINDOW_TOKENS.
        greedy_tokens: Length of the greedy continuation of the first window's first half.

    Raises:
        DataError: fewer than 2 tokens.
    """
    if ids.numel() < 2:
        raise DataError(f"{ids.numel()} tokens of text: a comparison needs at least 2; give a longer text")
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    with without_progress_bars():
        theirs = AutoModelForCausalLM.from_pretrained(source, **options).eval()
        ours = DiffTransformerForCausalLM.from_pretrained(target, **options).eval()
    prompt = ids[None, : max(1, min(WINDOW_TOKENS, ids.numel()) // 2)]
    first, second = (_greedy(model, prompt, greedy_tokens) for model in (theirs, ours))
    # Kernels round differently: with the same arithmetic on both sides, what is left is the conversion's.
    for model in (theirs, ours):
        model.set_attn_implementation("eager")
    largest = scale = divergence = 0.0
    for window in ids.split(WINDOW_TOKENS):
        a, b = (model(input_ids=window[None], use_cache=False).logits[0] for model in (theirs, ours))
        largest = max(largest, float((a - b).abs().max()))
        scale = max(scale, float(a.abs().max()))
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        divergence += float((a.exp() * (a - b)).sum())
    same = int((first == second).long().cumprod(0).sum())
    return Drift(
        tokens=ids.numel(),
        largest_logit_difference=largest,
        largest_logit=scale,
        mean_kl_nats=divergence / ids.numel(),
        greedy_tokens=greedy_tokens,
        greedy_same_tokens=same,
    )


def _greedy(model: PreTrainedModel, prompt: Tensor, tokens: int) -> Tensor:
    """The likeliest tokens one after another; an end of text does not stop them."""
    cache, inputs, made = None, prompt, [prompt.new_empty(0)]
    for _ in range(tokens):
        outputs = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = outputs.past_key_values, outputs.logits.argmax(-1)
        made.append(inputs[0])
    return torch.cat(made)
