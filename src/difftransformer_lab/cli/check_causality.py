"""difftransformer check causality."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from json import dumps
from typing import TYPE_CHECKING, Any, Literal

from difftransformer import progress
from difftransformer.errors import BackendUnavailable, ConfigError
from difftransformer.sources import check_model

from .arguments import check_device
from .console import complain, show, show_needle_next
from .progress import evaluation_progress

if TYPE_CHECKING:
    from torch import Tensor

EXIT_NOT_CAUSAL = 1
SHORTEST, LENGTH = 2, 513
_PACKED_TOKENS = 512  # in a call with packed documents: some backends form maps of that width
_DOCUMENT = 37  # tokens, so that documents do not end where a tile ends


def run(
    model: str,
    length: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    backend: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    json: bool = False,
) -> int:
    """Check that no logit of a model depends on later tokens, by replacing them and by leaving them out.

    The tokens are random. The exit status is 1 if the model looks into the future.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without remote code, .gguf file, or owner/name on the Hugging Face hub.
        length: Number of tokens, at least 2; 513 by default, or the model's positions. In one pass in fp32, or in a dtype that
            is given, all tokens up to the 512th are changed; otherwise only those next to every 16th and to where the cache
            or a document ends.
        dtype: Dtype to compute in; by default fp32 and bf16, on cuda also fp16.
        backend: Attention backend of a DIFF model or a DiffLlama; by default every backend that auto may take.
        seed: Seed of the tokens.
        device: cpu or cuda.
        json: Print JSON instead of sentences.
    """
    if length is not None and length < SHORTEST:
        raise ConfigError(f"--length {length}: give at least {SHORTEST}")
    check_device(device)
    check_model(model)
    import dataclasses

    import torch

    from difftransformer.attention import check_causality
    from difftransformer.hub.opening import open_model
    from difftransformer.ops import use_backend

    network = open_model(model, dtype="fp32", backend=backend or "auto").to(device).eval()
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    if (length or SHORTEST) > most:
        raise ConfigError(f"--length {length}: the model has {most} positions; give at most these")
    vocabulary = network.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (1, length or min(LENGTH, most)), generator=generator).to(device)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if device == "cuda" else {})
    if dtype is not None:
        dtypes = {dtype: {"fp16": torch.float16, **dtypes}[dtype]}
    checks: list[dict[str, Any]] = []
    worst, where = None, ""
    ways, first, backends = _ways(network), next(iter(dtypes)), _backends(network, backend, device)
    # Other dtypes and ways share code with fp32 in one pass, so they are tried at fewer positions, and below fp32 a cache and
    # packed documents by the backend that auto takes first alone.
    tries = [
        (word, name, how)
        for word in dtypes
        for name in backends
        for how in (ways if word == first or name == backends[0] else [*ways][:1])
    ]
    lacking: set[tuple[str, str]] = set()
    with nullcontext() if json else evaluation_progress(f"checking {model}"):
        for index, (word, name, how) in enumerate(tries):
            if (word, name) in lacking:
                continue
            network = network.to(dtypes[word])
            positions = None if (word, how) == (first, next(iter(ways))) else _positions(tokens.shape[1])
            try:
                with use_backend(name), progress.part(index, len(tries)):
                    result = check_causality(ways[how], tokens, vocabulary=vocabulary, positions=positions, seed=seed)
            except BackendUnavailable as error:
                if backend is not None:
                    raise
                reason = str(error).partition(f"{name}: ")[2] or str(error)  # the error names every backend
                complain(f"{name} in {word} does not take the model: {reason.partition(';')[0]}")
                lacking.add((word, name))
                continue
            checks.append({"dtype": word, "backend": name, "how": how, **dataclasses.asdict(result)})
            checks[-1]["is_causal"] = result.is_causal
            if worst is None or result.excess > worst.excess:
                worst, where = result, f"{how}, in {word}" + ("" if name == "auto" else f", backend {name}")
    if worst is None:
        raise ConfigError(f"{model}: no backend takes it on {device}")
    changed = checks[0]["positions"]
    if json:
        show(dumps({"is_causal": worst.is_causal, "positions": changed, "checks": checks}, indent=2))
    else:
        hows = list(dict.fromkeys(str(check["how"]) for check in checks))
        tried = Counter((check["dtype"], check["backend"]) for check in checks)
        named = ", ".join(
            (word if name == "auto" else f"{name} in {word}") + (f" {hows[0]}" if number < len(hows) else "")
            for (word, name), number in tried.items()
        )
        fewest = checks[-1]["positions"]
        others = "" if fewest == changed else f" in one pass in {checks[0]['dtype']}, {fewest} otherwise"
        show(f"{changed} of {tokens.shape[1] - 1} positions changed{others}; {', '.join(hows)}; {named}.")
        for what, change in (("were replaced", worst.changed), ("were left out", worst.alone)):
            at = f" (token {change.output}, when tokens from {change.position} on {what})" if change.size else ""
            show(f"When later tokens {what}, logits changed by at most {change.size:.1e}{at}.")
        verdict = "causal" if worst.is_causal else f"NOT causal: it looks into the future ({where})"
        show(f"{model}: {verdict}. In standard deviations of the logits; up to {worst.tolerance:g} is rounding.")
        if worst.is_causal:
            show_needle_next(model)
    return 0 if worst.is_causal else EXIT_NOT_CAUSAL


def _backends(network: Any, chosen: str | None, device: str) -> list[str]:
    """List the backends to try: all that `auto` may take here; a model of another package has its own."""
    from difftransformer.ops.backends import TABLE

    if chosen is not None:
        return [chosen]
    if not hasattr(network.config, "attn_backend"):
        return ["auto"]
    return list(dict.fromkeys(row.backend for row in TABLE if row.device_type in (None, device)))


def _positions(length: int) -> list[int]:
    """List the positions beside the borders of tiles, of what the cache holds and of documents."""
    from difftransformer.attention.causality import positions_beside_tiles

    borders = [_cached(length), *range(_DOCUMENT, length, _DOCUMENT)]
    beside = {border + offset for border in borders for offset in (-1, 0, 1)}
    return sorted({*positions_beside_tiles(length), *beside & {*range(1, length)}})


def _cached(length: int) -> int:
    return (length + 1) // 2


def _ways(network: Any) -> "dict[str, Callable[[Tensor], Tensor]]":
    """Map ways to compute logits (B, T, V) from tokens (B, T): in one pass, with a cache, as packed documents."""
    import torch

    def cached(tokens: "Tensor") -> "Tensor":
        half = _cached(tokens.shape[1])
        first = network(tokens[:, :half], use_cache=True)
        if not tokens[:, half:].numel():
            return first.logits
        rest = network(tokens[:, half:], past_key_values=first.past_key_values, use_cache=True)
        return torch.cat((first.logits, rest.logits), 1)

    def packed(tokens: "Tensor") -> "Tensor":
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] % _DOCUMENT
        # At least two rows at a time, which are laid end to end.
        rows = tokens.split(max(2, _PACKED_TOKENS // tokens.shape[1]))
        return torch.cat([network(some, position_ids=positions, use_cache=False).logits for some in rows])

    def whole(tokens: "Tensor") -> "Tensor":
        return network(tokens, use_cache=False).logits

    ways: dict[str, Callable[[Tensor], Tensor]] = {"in one pass": whole, "with a cache": cached}
    return ways | ({"packed": packed} if hasattr(network.config, "attn_backend") else {})
