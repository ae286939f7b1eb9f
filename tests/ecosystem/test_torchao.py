"""torchao's int8 weights: the logits of weights rounded here, and the same ones from the saved folder."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.tiny_folders import logits, saved, tokens


@torch.no_grad()
def rounded(network):
    """The model with every linear layer but the output one rounded to 255 steps a row, symmetric."""
    copied = copy.deepcopy(network)
    for name, module in copied.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            step = module.weight.abs().amax(dim=1, keepdim=True) / 127.5
            module.weight.copy_((module.weight / step).round().clamp(-128, 127) * step)
    return copied


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2"])
def test_int8_weights(attention_type, needs, tmp_path):
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    network, ids = saved(tmp_path / "full", attention_type, hidden_size=64), tokens(2, 24)
    exact, by_hand = logits(network, ids), logits(rounded(network), ids)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    del layers["lm_head"]
    assert len(layers) == 2 * (7 + (attention_type == "diff_v2"))
    for name, layer in layers.items():
        weight = quantized.get_submodule(name).weight
        assert type(weight).__name__ == "Int8Tensor", name
        # Half a step of the row is what int8 may be off by; a whole one where the largest weight of all is clamped.
        step = layer.weight.abs().amax(dim=1, keepdim=True) / 127.5
        assert ((weight.dequantize() - layer.weight).abs() <= 1.001 * step).all(), name
        assert ((weight.dequantize() - layer.weight).abs() <= 0.501 * step).float().mean() > 0.98, name
    found = logits(quantized, ids)
    error = (by_hand - exact).abs().max()
    assert 0 < error < 0.05 * exact.abs().max()
    assert (found - exact).abs().max() <= 1.5 * error
    assert (found - by_hand).abs().max() <= 0.5 * error
    quantized.save_pretrained(tmp_path / "int8")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "full")]
    assert sizes[0] < 0.5 * sizes[1]
    document = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert document["quantization_config"]["quant_method"] == "torchao"
    assert (tmp_path / "int8" / "README.md").is_file()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "int8"), ids), found)
    assert quantized.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 27)
