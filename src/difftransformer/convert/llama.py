"""Language models of Llama's layout made differential, or this package's plain Transformer, without changing their function.

Every source head stays one head, with a value of its own width, so that odd head counts are no obstacle:

| to        | what is added                                           | why nothing changes at the start               |
| --------- | ------------------------------------------------------- | ---------------------------------------------- |
| `softmax` | nothing                                                 | it is the same model                           |
| `diff`    | Q2, K2 (copies of Q1, K1), four lambda vectors a layer  | both exponents are equal and lambda_init is 0  |
| `diff_v2` | Q2 (a copy of Q1), the projection of lambda (zeros)     | lambda is sigmoid(0) = 1/2, and W_O is doubled |
| `dex`     | W_D (random) and lambda (0) for each chosen head        | lambda is 0                                    |

Each lambda has a gradient from the first step, and what only lambda lets through from the second.

A headwise norm would discard the size of every row, which W_O has learned to read, so `diff` starts without one.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig

from ..attention.differential import LAMBDA_STD, LAMBDA_VECTORS
from ..errors import ConfigError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from .conversion import Conversion, Read, Shape, shapes_of
from .diffllama import SHARED_FIELDS, TIES

TARGETS = ("diff", "diff_v2", "dex", "softmax")
CLASSES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "mistral": MistralConfig}
MUST_BE = {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}


def from_llama(
    config: PreTrainedConfig,
    *,
    to: str,
    head_norm: str | None = None,
    dex_heads: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Conversion:
    """Describe the conversion of a Llama or Mistral.

    Args:
        config: The source's configuration.
        to: One of `TARGETS`.
        head_norm: Only "none" or None: see above.
        dex_heads: For "dex", the heads that each layer extends; None means all.
        seed: Of what is drawn at random.

    Raises:
        ConfigError: the target is unknown, or a field has a value that no model of ours has.
    """
    if to not in TARGETS:
        raise ConfigError(f"--to {to!r} is unknown; choose one of {', '.join(TARGETS)}")
    if head_norm not in (None, "none"):
        raise ConfigError(
            f"head_norm={head_norm!r}: a headwise norm discards the size of each row, so the model could not keep its "
            "function; use 'none'"
        )
    if dex_heads is not None and to != "dex":
        raise ConfigError(f"dex_heads is of 'dex' alone, and --to is {to!r}; leave it out")
    for field, expected in MUST_BE.items():
        if getattr(config, field, expected) != expected:
            raise ConfigError(f"{field}={getattr(config, field)!r}: models here have {field}={expected!r} only")
    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS} | {
        "attention_type": to,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sliding_window": getattr(config, "sliding_window", None),
        "rope_parameters": dict(config.rope_parameters),
    }
    if to == "diff":
        fields |= {
            "num_differential_heads": config.num_attention_heads,
            "num_differential_key_value_heads": config.num_key_value_heads,
            "value_head_dim": config.head_dim,
            "head_norm": "none",
            "lambda_init": 0.0,
        }
    if dex_heads is not None:
        fields["dex_heads"] = [list(heads) for heads in dex_heads]
    ours = DiffTransformerConfig(**fields, architectures=["DiffTransformerForCausalLM"], dtype=config.dtype)
    ties = TIES if config.tie_word_embeddings else {}
    with torch.device("meta"):
        needs = shapes_of(AutoModelForCausalLM.from_config(config, attn_implementation="eager").state_dict())
        wanted = shapes_of(DiffTransformerForCausalLM(ours).state_dict())
    makes = {name: _make(name, shape, ours, seed) for name, shape in wanted.items() if name not in ties}
    return Conversion(
        config=json.loads(ours.to_json_string()), needs=needs, ties=ties, makes=makes, notes=_notes(config)
    )


def _make(name: str, shape: Shape, config: DiffTransformerConfig, seed: int) -> Callable[[Read], Tensor]:
    """How one tensor of the result comes from the source's tensors."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    to, layer = config.attention_type, name.partition("self_attn.")[0]
    if to in ("diff", "diff_v2") and part == "q_proj":
        return partial(_twice, name, config.num_attention_heads)
    if to == "diff" and part == "k_proj":
        return partial(_twice, name, config.num_key_value_heads)
    if to == "diff_v2" and part == "o_proj":
        return lambda read: 2 * read(name)
    if part == "lambda_proj" or part == "dex_lambda":
        return lambda read: torch.zeros(shape, dtype=read(f"{layer}self_attn.o_proj.weight").dtype)
    if part in LAMBDA_VECTORS:
        # One draw for both exponents: they are equal, and so is lambda to lambda_init, until they are trained.
        return lambda read: _normal(shape, LAMBDA_STD, f"{layer}{part[:-1]}", seed)
    if part == "dex_proj":
        std = config.head_dim**-0.5
        return lambda read: _normal(shape, std, name, seed).to(read(f"{layer}self_attn.o_proj.weight").dtype)
    return lambda read: read(name)


def _twice(name: str, heads: int, read: Read) -> Tensor:
    """Rows (head, D) as (head, map, D), the same for both maps."""
    return read(name).unflatten(0, (heads, 1, -1)).expand(-1, 2, -1, -1).flatten(0, 2)


def _normal(shape: Shape, std: float, name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) * std


def _notes(config: PreTrainedConfig) -> tuple[str, ...]:
    dropout = getattr(config, "attention_dropout", 0.0)
    return (f"attention_dropout={dropout} is left out: maps here have no dropout",) if dropout else ()
