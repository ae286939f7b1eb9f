"""Configuration of a Differential Transformer (arXiv:2410.05258), for `trust_remote_code=True`. Needs transformers 5.17."""

from typing import Any

from transformers import PreTrainedConfig


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of a decoder, or of a bidirectional encoder, in Llama's field names.

    `num_attention_heads`, `num_key_value_heads` and `head_dim` describe the Transformer of the same size. The attention types
    derive their own heads from these (see `Heads` in modeling_difftransformer.py), unless the fields below set them.

    Args:
        attention_type: "softmax", "diff" (DIFF V1), "diff_v2", "grouped_diff" (arXiv:2510.06949) or "dex" (arXiv:2505.16333).
        is_causal: False makes a bidirectional encoder.
        num_differential_heads, num_differential_key_value_heads, value_head_dim: Heads of a differential layer and the width of
            a value; None derives them.
        num_noise_heads: Second maps of a "grouped_diff" layer; None means a fourth of the signal heads, or a third.
        lambda_form: "layer", "head", "token" or "constant"; None means "token" in "diff_v2" and "layer" elsewhere.
        lambda_init: Constant term of lambda; None means 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.
        head_norm: Norm of each head's output: "gain", "plain" or "none"; None means "none" in "diff_v2" and "gain" elsewhere.
        shared_key: Whether both maps read one key; None means True in "diff_v2" and False elsewhere.
        dex_heads: Extended heads of each layer of "dex"; None means all.
        initialization, attn_backend: Not used here; the package `difftransformer` reads them.
    """

    model_type = "difftransformer"
    keys_to_ignore_at_inference = ["past_key_values"]

    attention_type: str = "diff"
    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = None  # type: ignore[assignment]  # filled in below, like the next two
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    initializer_range: float = 0.02
    initialization: str = "normal"
    tie_word_embeddings: bool = True
    use_cache: bool = True
    attn_backend: str = "auto"
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_differential_heads: int | None = None
    num_differential_key_value_heads: int | None = None
    value_head_dim: int | None = None
    num_noise_heads: int | None = None
    lambda_form: str | None = None
    lambda_init: float | None = None
    head_norm: str | None = None
    head_norm_eps: float = 1e-5
    shared_key: bool | None = None
    dex_heads: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = round(8 * self.hidden_size / 3)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None and "rope_theta" not in kwargs:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        super().__post_init__(**kwargs)
