"""Exported programs, computed by processes that cannot import this package."""

import torch
from torch import nn
from torch.export import Dim

from tests.support.tiny_folders import logits, saved, tokens


class Logits(nn.Module):
    """The output as a tensor: a process without transformers does not know its classes of outputs."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, ids):
        return self.network(ids, use_cache=False).logits


def test_pt2_at_other_lengths(outside, tmp_path):
    network, ids, sizes = saved(tmp_path / "m"), tokens(3, 70), {0: Dim("B"), 1: Dim("T")}
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
