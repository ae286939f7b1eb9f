"""The heads that vLLM reads from a configuration, where it does not ask the layers (caches and kernels' plans)."""

from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from .heads import ServedHeads


class HeadsConvertor(ModelArchConfigConvertorBase):  # type: ignore[misc]
    """Give vLLM the heads of `ServedHeads`; the configuration's own fields describe the same-size Transformer."""

    def get_total_num_attention_heads(self) -> int:
        """Return the query heads of all ranks."""
        return ServedHeads.of(self.hf_text_config).query_heads

    def get_total_num_kv_heads(self) -> int:
        """Return the key/value heads of all ranks."""
        return ServedHeads.of(self.hf_text_config).key_value_heads

    def get_head_size(self) -> int:
        """Return the width of a joint head."""
        return ServedHeads.of(self.hf_text_config).head_size
