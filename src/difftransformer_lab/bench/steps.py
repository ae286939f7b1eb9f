"""The parts of `bench`, each a list of steps."""

from collections.abc import Callable
from typing import Literal

from .attention import attention_steps, memory_steps
from .models import generation_steps, model_steps
from .settings import Settings, Step

Part = Literal["attention", "memory", "models", "generation", "all"]
PARTS: dict[str, Callable[[Settings], list[Step]]] = {
    "attention": attention_steps,
    "memory": memory_steps,
    "models": model_steps,
    "generation": generation_steps,
}


def steps_of(part: Part, settings: Settings) -> list[Step]:
    """List the steps of a part, or of all parts, in the order in which they run."""
    return [step for name, steps in PARTS.items() if part in (name, "all") for step in steps(settings)]
