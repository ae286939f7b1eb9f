"""Run the attention of transformers' models (DiffLlama, Llama, Mistral and others) on this package's operator, in place."""

from .attention_function import IMPLEMENTATION
from .diffllama import AcceleratedDiffLlamaAttention
from .switch import accelerate, restore
