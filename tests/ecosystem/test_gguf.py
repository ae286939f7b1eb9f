"""The road to llama.cpp: a DEX model becomes a `llama` folder, and its tensors a GGUF file, which transformers reads here."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from difftransformer.families import convert_folder
from tests.support.tiny_models import tiny, tokens


def write(network, path, gguf):
    """What llama.cpp's script writes of a Llama: its rows of q and k are pairs of neighbours."""
    config = network.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in network.state_dict().items():
        if (part := name.split(".")[-2]) in heads:
            tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore")  # of transformers' reader
@torch.no_grad()
def test_a_dex_model_as_gguf(needs, tmp_path):
    gguf = needs("gguf")
    needs("accelerate")
    from transformers import GgufConfig

    ours = tiny(attention_type="dex", tie_word_embeddings=False, num_key_value_heads=2).eval()
    assert all(layer.self_attn.dex_lambda.abs().min() > 0 for layer in ours.model.layers)
    ours.save_pretrained(tmp_path / "dex")
    convert_folder(tmp_path / "dex", tmp_path / "llama", to="llama")
    write(AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), tmp_path / "m.gguf", gguf)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    assert type(read).__name__ == "LlamaForCausalLM"
    ids = tokens(2, 9)
    torch.testing.assert_close(
        read(ids).logits, ours(ids).logits, rtol=0, atol=1e-5 * ours(ids).logits.abs().max().item()
    )
