"""The model in torchtitan, where torchtitan is installed: logits, names of weights, and gradients on one and two ranks."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.errors import ConfigError
from tests.support.parallel_steps import run_main

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
IDS = torch.arange(48).reshape(2, 24)


def built(config):
    """The model as torchtitan's trainer builds it: on the meta device, divided, then filled."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims

    from examples.torchtitan_model import BACKEND, model_spec

    spec = model_spec(config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    parallel_dims.device_type = "cpu"  # without a GPU, torchtitan takes "cuda"
    dims = ParallelDims.from_config(ParallelismConfig(spmd_backend=BACKEND), dist.get_world_size())
    dims.build_mesh()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=None,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return spec, model.train()


def main():
    """Be a rank: print differences to the model outside torchtitan."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    dist.init_process_group("gloo")
    rows = IDS.chunk(dist.get_world_size())[dist.get_rank()]
    whole, found = StateDictOptions(full_state_dict=True), {}
    for attention_type, tied, initialization in (("diff", False, "fan_in"), ("diff_v2", True, "normal")):
        fields = {"attention_type": attention_type, "tie_word_embeddings": tied, "initialization": initialization}
        config = DiffTransformerConfig(**SIZES | fields)
        torch.manual_seed(0)
        plain = DiffTransformerForCausalLM(config)
        saved = {name: value for name, value in plain.state_dict().items() if not (tied and name == "lm_head.weight")}
        torch.manual_seed(0)
        spec, model = built(config)
        adapter = spec.state_dict_adapter(spec.model, None)
        drawn = get_model_state_dict(model, options=whole)
        drawn_as_whole = all(torch.equal(drawn[f"model.{name}"], value) for name, value in saved.items())
        named = adapter.to_hf(get_model_state_dict(model, options=whole))
        assert set(named) == set(saved)
        given = adapter.from_hf(saved)
        set_model_state_dict(model, given, options=whole)
        logits, expected = model(rows), plain(IDS).logits
        own = expected.chunk(dist.get_world_size())[dist.get_rank()]
        F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").backward()
        F.cross_entropy(expected[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum").backward()
        gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
        worst = max(
            ((gradients[f"model.{name}"] - weight.grad).abs().max() / weight.grad.abs().max()).item()
            for name, weight in plain.named_parameters()
        )
        parameters, _ = spec.model.get_nparams_and_flops(model, 64)
        assert parameters == sum(weight.numel() for weight in plain.parameters())
        found[attention_type] = [(logits - own).abs().max().item(), worst, drawn_as_whole]
    print(json.dumps(found), flush=True)
    os._exit(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_and_gradients_are_those_of_the_model(ranks):
    pytest.importorskip("torchtitan")
    for done in run_main(ranks, __name__):
        for logits, gradients, drawn_as_whole in json.loads(done.stdout.splitlines()[-1]).values():
            assert logits < 1e-5
            assert gradients < 1e-4
            assert drawn_as_whole


@pytest.mark.parametrize(
    ("training", "parallelism", "words"),
    [
        ({"seq_len": 128}, {}, "training.seq_len=128 is above max_position_embeddings=64"),
        ({}, {"tensor_parallel_degree": 2}, "tensor_parallel_degree=2: only data_parallel degrees"),
        ({}, {"spmd_backend": "spmd_types"}, "spmd_backend='spmd_types': only 'partial_dtensor' is supported"),
    ],
)
def test_what_it_cannot_do_is_refused(training, parallelism, words):
    pytest.importorskip("torchtitan")
    from types import SimpleNamespace

    from torchtitan.config import ParallelismConfig, TrainingConfig

    from examples.torchtitan_model import model_spec

    config = SimpleNamespace(
        training=TrainingConfig(**{"seq_len": 64} | training),
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor"} | parallelism),
    )
    with pytest.raises(ConfigError, match=words):
        model_spec(DiffTransformerConfig(**SIZES)).model.update_from_config(config=config)
