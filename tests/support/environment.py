"""The machine and software of results that no machine has measured."""

from difftransformer_lab.results import Environment

ENVIRONMENT = Environment(
    difftransformer="0.1.0", python="3.11.2", torch="2.13.0+cpu", transformers="5.17.0", platform="Linux-6.1-x86_64",
    processor="Example CPU, 2 cores", device="cpu", threads=2, commit="0123456789abcdef0123456789abcdef01234567",
)  # fmt: skip
