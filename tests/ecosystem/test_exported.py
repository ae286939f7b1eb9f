"""Exported programs, computed by processes that cannot import this package."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.tiny_folders import differential_qwen, logits, saved, tokens


class Logits(nn.Module):
    """The output as a tensor: a process without transformers does not know its classes of outputs."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, ids):
        return self.network(ids, use_cache=False).logits


@pytest.mark.parametrize("made", [saved, differential_qwen])
def test_pt2_at_other_lengths(made, outside, tmp_path):
    network, ids, sizes = made(tmp_path / "m"), tokens(3, 70), {0: Dim("B"), 1: Dim("T")}
    program = torch.export.export(Logits(network.eval()), (tokens(2, 9),), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(ids, tmp_path / "ids.pt")
    outside("""if True:
        import torch
        model = torch.export.load("model.pt2").module()
        torch.save(model(torch.load("ids.pt", weights_only=True)).detach(), "logits.pt")
    """)
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    torch.testing.assert_close(found, logits(network, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_pte(outside, tmp_path):
    """ExecuTorch's file of fixed lengths, by its own runtime."""
    exir = pytest.importorskip("executorch.exir")
    network, ids = saved(tmp_path / "m"), tokens(1, 9)
    program = exir.to_edge(torch.export.export(Logits(network.eval()), (ids,))).to_executorch()
    (tmp_path / "model.pte").write_bytes(program.buffer)
    torch.save(ids, tmp_path / "ids.pt")
    outside("""if True:
        import torch
        from executorch.runtime import Runtime
        method = Runtime.get().load_program("model.pte").load_method("forward")
        torch.save(method.execute([torch.load("ids.pt", weights_only=True)])[0].clone(), "logits.pt")
    """)
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    torch.testing.assert_close(found, logits(network, ids), atol=1e-5, rtol=1e-5)
