"""Models that are divided before they have values: the same weights as a model built whole, and the memory of a part."""

import json

import pytest
import torch
from safetensors.torch import load_file

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.errors import ConfigError
from difftransformer.families.checkpoint_io import WeightsReader
from difftransformer.hub import open_deferred
from difftransformer.model.initialization import local_part as part
from difftransformer.train import ParallelConfig, build_model
from difftransformer.train.parallel import DeferredModel, Mesh
from difftransformer.train.parallel.mesh import whole
from difftransformer.typed import build
from tests.support.parallel_steps import HEADS, VARIANTS, run_code, settings
from tests.support.peak_memory import LINUX, forget_peak, resident, return_freed_memory
from tests.support.tiny_models import tiny, tiny_config

CASES = {
    **VARIANTS,
    "dex": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "grouped_diff_v2": {"num_attention_heads": 20, "num_noise_heads": 4},
}


@pytest.mark.parametrize("initialization", ["normal", "mimetic", "fan_in"])
@pytest.mark.parametrize("word", CASES)
def test_values_are_those_of_a_model_built_whole(word, initialization):
    for tied, pad in ((False, None), (True, 3)):
        options = {"tie_word_embeddings": tied, "pad_token_id": pad, "initialization": initialization}
        config = DiffTransformerConfig(attention_type=word, vocab_size=50, **HEADS | CASES[word] | options)
        before = torch.get_rng_state()
        whole, start = build_model(config, 3), DeferredModel(lambda config=config: build_model(config, 3))
        assert all(parameter.is_meta == (parameter.dim() > 1) for parameter in start.network.parameters())
        parameters = dict(start.network.named_parameters())
        start.fill("cpu")
        assert torch.equal(torch.get_rng_state(), before)
        filled = start.network.state_dict()
        assert all(torch.equal(filled[name], tensor) for name, tensor in whole.state_dict().items())
        assert all(torch.equal(*pair) for pair in zip(start.network.buffers(), whole.buffers(), strict=True))
        assert all(parameters[name] is parameter for name, parameter in start.network.named_parameters())
        assert (start.network.lm_head.weight is start.network.model.embed_tokens.weight) == tied


def test_a_matrix_that_no_start_fills_is_an_error():
    """Values that a constructor draws are lost on the meta device, so a variant draws them in init_own_parameters."""

    class Drawn(DiffTransformerForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.extra = torch.nn.Parameter(torch.rand(3, 3))

    start = DeferredModel(lambda: Drawn(tiny_config()))
    with pytest.raises(ConfigError, match=r"^model\.extra: no start fills this matrix; draw it in init_own_parameters"):
        start.fill("cpu")


LARGE = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 4}
IN_EACH_PROCESS = """
    import json, os, sys
    import torch
    from difftransformer.train.parallel import joined
    from tests.train import test_deferred

    with joined("cpu") as processes:
        found = {
            "read": test_deferred.read_parts(processes, sys.argv[1]),
            "bytes": test_deferred.peak_bytes(processes),
        }
        torch.distributed.barrier()  # process 0 holds the store through which the others meet, so it must not leave first
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def divided(processes, start, layout):
    """The model of a start on a mesh, filled."""
    mesh = Mesh(processes, build(ParallelConfig, layout, source="", error=ValueError))
    placed = mesh.place(start.network, settings(1))
    start.fill("cpu")
    return placed


def read_parts(processes, folder):
    """Numbers that are read from files and that this process holds, and whether the whole is what was saved."""
    sizes, read = [], WeightsReader.read_part

    def counted(reader, name, index):
        sizes.append(read(reader, name, index).numel())
        return read(reader, name, index)

    WeightsReader.read_part = counted
    with open_deferred(folder) as start:
        placed = divided(processes, start, {"data": {"shard": 2}, "tensor": 2})
    parameters = dict(placed.named_parameters())
    held = sum(part(parameter)[0].numel() for parameter in parameters.values())
    saved = load_file(f"{folder}/model.safetensors")
    same = all(torch.equal(whole(parameter.detach()), saved[name].float()) for name, parameter in parameters.items())
    return sum(sizes), held, same


def peak_bytes(processes):
    """Memory that building, dividing and filling takes at its peak; bytes of the part; of the largest matrix; of the model."""

    def built(**options):
        return divided(processes, DeferredModel(lambda: build_model(tiny_config(**options), 3)), {"data": {"shard": 4}})

    built()  # what is loaded at first use is not counted
    return_freed_memory()
    forget_peak()
    before = resident()
    placed = built(**LARGE)
    peak = resident(peak=True) - before
    parameters = list(placed.parameters())
    held = sum(part(parameter)[0].numel() for parameter in parameters)
    sizes = [parameter.numel() for parameter in parameters]
    return [peak, *(4 * count for count in (held, max(sizes), sum(sizes)))]


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="the peak is read from Linux")
def test_every_process_of_a_mesh_gets_its_part_alone(tmp_path):
    tiny(attention_type="grouped_diff", num_attention_heads=10, head_dim=4).to(torch.bfloat16).save_pretrained(tmp_path)
    for done in run_code(4, IN_EACH_PROCESS, tmp_path):
        found = json.loads(done.stdout)
        read, held, same = found["read"]
        assert same
        assert read == held
        peak, own, largest, model = found["bytes"]
        assert own < 0.26 * model
        assert own < peak < own + largest
