"""Numbers and moments of a device, which the host reads while the device goes on computing."""

import time

import torch
from torch import Tensor


class Moment:
    """A moment of a device's work; on a CPU, now.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._time, self._event = (
            time.perf_counter(),
            torch.cuda.Event(enable_timing=True) if device == "cuda" else None,
        )
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Return the time between two moments that the device has passed."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return 1e-3 * earlier._event.elapsed_time(self._event)


class OnTheWay:
    """Numbers that the device sends to the host when it has computed them.

    Args:
        numbers: (N,).
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self.sent = Moment(numbers.device.type)

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        self.sent.wait()
        return self._numbers.tolist()
