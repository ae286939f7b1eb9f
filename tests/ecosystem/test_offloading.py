"""accelerate keeps layers on the CPU or the disk, and fetches each module's weights when it runs: the plain model's results."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.requests import Loss
from tests.support.tiny_models import tiny, tokens

# Vectors of the layer itself, projections of its own, and a gate.
kinds = pytest.mark.parametrize("attention_type", ["diff", "dex", "grouped_diff_v2"])


def agree(offloaded, plain):
    ids = tokens(2, 9)
    with torch.no_grad():
        assert (offloaded(ids).logits - plain(ids).logits).abs().max() <= 1e-5
    found, expected = (model.generate(ids, max_new_tokens=5, do_sample=False) for model in (offloaded, plain))
    assert torch.equal(found, expected)


@kinds
def test_offloaded_by_hand(attention_type, needs, tmp_path):
    accelerate = needs("accelerate")
    plain = tiny(attention_type=attention_type)
    agree(accelerate.cpu_offload(tiny(attention_type=attention_type), torch.device("cpu")), plain)
    agree(accelerate.disk_offload(tiny(attention_type=attention_type), tmp_path, torch.device("cpu")), plain)


@kinds
def test_device_map(attention_type, needs, tmp_path):
    needs("accelerate")
    plain = tiny(attention_type=attention_type, tie_word_embeddings=False)
    plain.save_pretrained(tmp_path / "saved")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert {p.device.type for p in offloaded.model.layers[1].parameters()} == {"meta"}
    agree(offloaded, plain)
    requests = [Loss(tuple(row)) for row in tokens(2, 9).tolist()]
    found, expected = (dict(CausalLanguageModel(one, tokenizer=None).answer(requests)) for one in (offloaded, plain))
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
