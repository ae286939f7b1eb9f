"""The learning rate as a pure function of the step."""

from .config import ScheduleConfig


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up to `peak`, then linear decay to `floor * peak`."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    decay_steps = max(1, steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    return peak * (1.0 - (1.0 - schedule.floor) * done)
