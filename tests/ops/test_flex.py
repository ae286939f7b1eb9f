"""The `flex` backend: as it runs on the CPU, its masks of blocks, and what it compiles and refuses.

`test_conformance.py` has the numbers of the path that it takes on a GPU.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import differential_attention, flex
from difftransformer.ops import reference as equations
from difftransformer.ops.problem import Restrictions
from tests.support.cases import BY_NAME, exact, ints, op, problem, random_mask
from tests.support.op_backends import flex_as_on_a_gpu
from tests.support.oracle import Case, relative_error

# torch.compile hides this warning of its own, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("grouped, cross, narrow value", torch.float32),
        ("both ends, causal mask", torch.float64),
        ("documents", torch.float32),
        ("softmax", torch.float64),
    ],
)
def test_on_the_cpu(name, dtype):
    """Inputs that require a gradient are taken where none is recorded."""
    query, key, value, lam, _ = BY_NAME[name].inputs(dtype)
    with torch.no_grad():
        out = op(BY_NAME[name], "flex")(query, key, value, lam)
    assert out.dtype == dtype
    assert relative_error(out, exact(BY_NAME[name], dtype)["out"]) < (2e-5 if dtype == torch.float32 else 1e-12)


def test_lengths_and_windows_share_one_compiled_form(monkeypatch):
    """Restrictions are data. It compiles again for the second length and for the second number of blocks."""
    flex_as_on_a_gpu(monkeypatch)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    counts = []
    for length, window in ((130, 3), (131, 70), (300, 9), (257, 1000), (500, 2)):
        query, key, value, lam, _ = Case("x", T=length, S=length).inputs(requires_grad=False)
        differential_attention(query, key, value, lam, is_causal=True, window=window, backend="flex")
        counts.append(counter.frame_count)
    assert counts == [1, 2, 3, 3, 3]


# (T, S) and restrictions: what is skipped must be what PyTorch's own search of a whole mask would skip.
BLOCKED = {
    "causal": (300, 300, {"is_causal": True}),
    "decoding": (3, 1000, {"is_causal": True}),
    "more queries than keys": (700, 300, {"is_causal": True}),
    "window": (600, 700, {"is_causal": True, "window": 150}),
    "padding": (300, 300, {"is_causal": True, "kv_start": ints(0, 130, 300)}),
    "lengths": (130, 520, {"is_causal": True, "kv_lengths": ints(0, 520, 385), "window": 200}),
    "documents": (700, 700, {"cu_seqlens": ints(0, 100, 256, 256, 700)}),
    "causal documents": (700, 700, {"is_causal": True, "cu_seqlens": ints(0, 300, 310, 700)}),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_are_those_of_the_whole_mask(name):
    queries, keys, given = BLOCKED[name]
    restrictions = Restrictions(**given)
    ours = flex._block_mask(restrictions, 3, queries, keys, torch.device("cpu"))
    allowed = equations.allowed_keys(restrictions, queries, keys, torch.device("cpu")).expand(3, 1, -1, -1)
    theirs = torch_flex.create_block_mask(lambda b, h, q, k: allowed[b, 0, q, k], 3, None, queries, keys, "cpu")
    for ours_num, ours_columns, num, columns in (
        (ours.kv_num_blocks, ours.kv_indices, theirs.kv_num_blocks, theirs.kv_indices),
        (ours.full_kv_num_blocks, ours.full_kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        assert torch.equal(ours_num.expand_as(num), num)
        listed = torch.arange(columns.shape[-1]) < num.unsqueeze(-1)
        assert torch.equal(ours_columns.expand_as(columns)[listed], columns[listed])


def test_a_bool_mask_is_looked_up_in_every_block():
    """A kernel asks no mask inside a block that is said to be seen in full."""
    causal = Restrictions(is_causal=True)
    device = torch.device("cpu")
    plain = flex._block_mask(causal, 1, 384, 384, device)
    masked = flex._block_mask(causal._replace(attn_mask=random_mask(384)), 1, 384, 384, device)
    assert plain.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]
    assert masked.full_kv_num_blocks.tolist() == [[[0, 0, 0]]]
    assert torch.equal(masked.kv_num_blocks, plain.kv_num_blocks + plain.full_kv_num_blocks)


@pytest.mark.parametrize("given", [{"attn_mask": random_mask(1, 1, 1, 4096)}, {"is_causal": True, "kv_start": ints(9)}])
def test_the_mask_takes_little_memory_and_reads_nothing(given, monkeypatch):
    """No tensor of T x S, and no wait for a device."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    def refuse(tensor):
        raise AssertionError("read a value")

    with monkeypatch.context() as patch, Sizes():
        for method in ("tolist", "item", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, method, refuse)
        flex._block_mask(Restrictions(**given), 1, 4096, 4096, torch.device("cpu"))
    assert 4096 <= largest <= 8192


def test_no_mask_where_nothing_is_restricted():
    device = torch.device("cpu")
    assert flex._block_mask(Restrictions(), 1, 9, 9, device) is None
    assert flex._block_mask(Restrictions(is_causal=True), 1, 1, 9, device) is None
    assert flex._block_mask(Restrictions(is_causal=True, window=9), 1, 1, 9, device) is None
    assert flex._block_mask(Restrictions(is_causal=True, window=8), 1, 1, 9, device) is not None
    assert flex._block_mask(Restrictions(is_causal=True), 1, 9, 9, device) is not None


def test_what_it_cannot_run(monkeypatch):
    assert flex.supports(problem()) is None
    assert flex.has_quadratic_memory(problem())
    assert not flex.has_quadratic_memory(problem(device_type="cuda"))
    assert "no gradient on cpu" in flex.supports(problem(needs_grad=True))
    assert "not on meta" in flex.supports(problem(device_type="meta"))
    assert "no queries" in flex.supports(problem(0))
    monkeypatch.setattr(flex, "_missing", lambda: "no Triton")
    assert flex.supports(problem(device_type="cuda")) == "no Triton"
    monkeypatch.setattr(flex, "_missing", lambda: None)
    assert flex.supports(problem(device_type="cuda", needs_grad=True)) is None
    assert "not float64" in flex.supports(problem(device_type="cuda", dtype=torch.float64))
    assert "at least 16" in flex.supports(problem(device_type="cuda", width=15))
    query, key, value, lam, _ = Case("x").inputs()
    with pytest.raises(BackendUnavailable, match="flex: FlexAttention has no gradient on cpu"):
        differential_attention(query, key, value, lam, backend="flex")
