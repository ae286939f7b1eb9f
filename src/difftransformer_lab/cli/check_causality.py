"""difftransformer check causality."""

from json import dumps
from typing import Any

from difftransformer.errors import ConfigError
from difftransformer.sources import check_model

from .arguments import check_device
from .console import show

ARGUMENTS: dict[str, dict[str, Any]] = {"--json": {"action": "store_true", "help": "Print JSON instead of sentences."}}
EXIT_NOT_CAUSAL = 1
SHORTEST = 2


def run(model: str, length: int = 128, seed: int = 0, device: str = "cpu", json: bool = False) -> int:
    """Check that no logit of a model depends on later tokens, by changing these and by leaving them out.

    The model is opened in fp32 and gets random tokens. The exit status is 1 if it looks into the future.

    Args:
        model: Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens
            without remote code, .gguf file, or owner/name on the Hugging Face hub.
        length: Number of tokens, at least 2. A leak over a longer range than this is not found.
        seed: Seed of the tokens.
        device: cpu or cuda.
    """
    if length < SHORTEST:
        raise ConfigError(f"--length {length}: give at least {SHORTEST}")
    check_device(device)
    check_model(model)
    import dataclasses

    import torch

    from difftransformer.hub.opening import open_model

    from ..evals.causality import check_causality

    network = open_model(model, dtype="fp32").to(device).eval()
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None) or length
    if length > most:
        raise ConfigError(f"--length {length}: the model has {most} positions; give at most these")
    vocabulary = network.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed)).to(device)
    found = check_causality(network, tokens, vocabulary=vocabulary, seed=seed)
    if json:
        show(dumps(dataclasses.asdict(found) | {"is_causal": found.is_causal}, indent=2))
    else:
        for what, change in (("were replaced", found.changed), ("were left out", found.alone)):
            where = f"(that of token {change.output} when those from {change.position} on {what})"
            show(
                f"When later tokens {what}, logits changed by at most {change.size:.1e} {where if change.size else ''}".strip()
            )
        verdict = "causal" if found.is_causal else "NOT causal: it looks into the future"
        show(f"{model}: {verdict}. In standard deviations of the logits; up to {found.tolerance:g} is rounding.")
    return 0 if found.is_causal else EXIT_NOT_CAUSAL
