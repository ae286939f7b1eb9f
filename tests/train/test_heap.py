"""Training processes do not return the memory of a step to the system and ask for it again."""

import platform

import pytest

from difftransformer.train import heap
from tests.support import fresh

FAULTS = """
import resource, torch
from difftransformer.train.heap import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_tensors_reuse_freed_memory():
    assert int(fresh.Fresh(FAULTS).finish().stdout) < 1000  # of 163,840 pages


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap.keep_freed_memory()
