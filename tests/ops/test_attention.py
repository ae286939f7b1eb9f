"""The op's maps, its refusals, and what `chunked` does where lengths cannot be read.

`test_conformance.py` has the numbers of every backend, `test_contract.py` what they promise beside them.
"""

import dataclasses

import pytest
import torch

from difftransformer.errors import BackendUnavailable, ConfigError, ShapeError
from difftransformer.ops import (
    attention_maps,
    backends,
    chunked,
    differential_attention,
    normed_differential_attention,
    observe_inputs,
    softmax_attention,
    softmax_maps,
)
from tests.support import oracle
from tests.support.cases import BY_NAME, READS_LENGTHS, assert_close, by_name, exact, ints, op
from tests.support.op_backends import PLAIN
from tests.support.oracle import Case, output_and_gradients, relative_error


@pytest.mark.parametrize("case", READS_LENGTHS, ids=by_name)
def test_chunked_where_lengths_cannot_be_read(case, monkeypatch):
    """What a GPU does: no value is read, masks stand in."""

    def refuse(tensor):
        raise AssertionError("read a value")

    monkeypatch.setattr(chunked, "_is_host", lambda device: False)
    query, key, value, lam, grad = case.inputs()
    function = op(case, "chunked")
    with monkeypatch.context() as patch:
        # The checks of the public function read values on the CPU; the backend alone must not.
        for module in ("problem", "isolation"):
            patch.setattr(f"difftransformer.ops.{module}.is_readable", lambda tensor: False)
        for method in ("tolist", "item", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, method, refuse)
        out = function(query, key, value, lam)
        out.backward(grad)
    results = {"out": out.detach(), "query": query.grad, "key": key.grad, "value": value.grad}
    if lam is not None:
        results["lam"] = lam.grad
    assert_close(results, exact(case), 2e-5)


@pytest.mark.parametrize(
    "name", ["63 own heads causal", "both ends, mask", "mask by head", "grouped, cross, narrow value"]
)
def test_chunked_in_small_tiles(name, monkeypatch):
    monkeypatch.setattr(chunked, "CPU_TILE_ELEMENTS", 1)
    monkeypatch.setattr(chunked, "BLOCK_ROWS", 4)
    monkeypatch.setattr(chunked, "MIN_BLOCK_POSITIONS", 3)
    assert_close(
        output_and_gradients(op(BY_NAME[name], "chunked"), BY_NAME[name], torch.float32), exact(BY_NAME[name]), 2e-5
    )


@pytest.mark.parametrize("name", ["grouped, cross, narrow value", "shared key", "mask with empty rows", "documents"])
def test_attention_maps(name):
    """The maps, applied to V as the equation says, are the output; rows sum to 1 or, where nothing is seen, to 0."""
    case = BY_NAME[name]
    query, key, value, lam, _ = case.inputs(torch.bfloat16, requires_grad=False)
    map_1, map_2 = attention_maps(query, key, **case.kwargs)
    assert map_1.dtype == map_2.dtype == torch.float32
    assert map_1.shape == map_2.shape == (case.B, case.H, case.T, case.S)
    seen = oracle.dense_mask(case)
    for one_map in (map_1, map_2):
        torch.testing.assert_close(one_map.sum(-1), seen.any(-1).float())
        assert (one_map[~seen] == 0).all()
    lam = lam.unsqueeze(-1) if lam.dim() == 3 else lam.view(1, -1, 1, 1)
    out = (map_1 - lam * map_2) @ value.float().repeat_interleave(case.H // case.G, 1)
    assert relative_error(out, exact(case, torch.bfloat16)["out"]) < 2e-5


def test_softmax_maps():
    case = BY_NAME["softmax, cache"]
    query, key, value, _, _ = case.inputs(requires_grad=False)
    weights = softmax_maps(query, key, **case.kwargs)
    assert relative_error(weights @ value, exact(case)["out"]) < 2e-5
    assert softmax_maps(query.double(), key.double(), **case.kwargs).dtype == torch.float64


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def call(**changes):
    """A valid call with changes; for what must raise."""
    arguments = {"query": zeros(2, 4, 5, 8), "key": zeros(2, 2, 7, 8), "value": zeros(2, 2, 7, 6), "lam": 0.5}
    return differential_attention(**arguments | changes)


PACKED = {"query": zeros(1, 2, 6, 8), "key": zeros(1, 2, 6, 8), "value": zeros(1, 2, 6, 8)}
REFUSED = [
    (ShapeError, {"query": zeros(4, 5, 8)}, "query: shape .* has 3 dimensions"),
    (ShapeError, {"value": zeros(2, 2, 7)}, "value: shape .* must have 4"),
    (ShapeError, {"query": zeros(2, 4, 5, 7)}, "query: last dimension is 7; it must be even"),
    (ShapeError, {"query": zeros(2, 4, 5, 0)}, "no width"),
    (ShapeError, {"key": zeros(2, 2, 7, 6)}, "key: shape .* width = 8 or 4"),
    (ShapeError, {"key": zeros(1, 2, 7, 8)}, "key: shape .* B = 2"),
    (ShapeError, {"key": zeros(2, 3, 7, 8)}, "H = 4 heads and key G = 3 groups; H must be a multiple"),
    (ShapeError, {"value": zeros(2, 2, 6, 8)}, "value: shape .* does not fit key"),
    (ShapeError, {"value": zeros(2, 4, 7, 8)}, "value: shape .* does not fit key"),
    (ShapeError, {"key": zeros(2, 2, 7, 8, dtype=torch.bfloat16)}, "key: dtype torch.bfloat16, query is torch.float32"),
    (ShapeError, {"query": zeros(2, 4, 5, 8, dtype=torch.int32)}, "query: dtype torch.int32"),
    (ShapeError, {"key": torch.zeros(2, 2, 7, 8, device="meta")}, "key: on meta, query is on cpu"),
    (ShapeError, {"lam": zeros(3)}, r"lam: shape \(3,\); it must be a scalar, \(H,\) = \(4,\)"),
    (ShapeError, {"lam": zeros(2, 4)}, "lam: shape"),
    (ShapeError, {"lam": torch.tensor(1)}, "lam: dtype torch.int64; it must be floating"),
    (ShapeError, {"attn_mask": zeros(5, 7)}, "attn_mask: dtype torch.float32; it must be bool"),
    (ShapeError, {"attn_mask": zeros(5, 6).bool()}, r"attn_mask: shape \(5, 6\) does not broadcast"),
    (ShapeError, {"attn_mask": zeros(1, 2, 4, 5, 7).bool()}, "attn_mask: shape .* does not broadcast"),
    (ConfigError, {"window": 3}, "window=3 needs is_causal=True"),
    (ConfigError, {"window": 0, "is_causal": True}, "window=0; it must be at least 1"),
    (ConfigError, {"window": 2**70, "is_causal": True}, "window=1180591620717411303424; it must be at most 2147483647"),
    (ShapeError, {"kv_start": zeros(2)}, "kv_start: dtype torch.float32; it must be int32"),
    (ShapeError, {"kv_lengths": ints(7)}, r"kv_lengths: shape \(1,\); it must be \(B,\) = \(2,\)"),
    (ShapeError, {"kv_lengths": ints(7, 8)}, r"kv_lengths: values \[7, 8\]; each must lie between 0 and S = 7"),
    (ShapeError, {"kv_start": ints(-1, 0)}, r"kv_start: values \[-1, 0\]"),
    (ShapeError, {"cu_seqlens": ints(0, 5)}, "cu_seqlens: B = 2, T = 5, S = 7; .* need B = 1 and T = S"),
    (ConfigError, PACKED | {"cu_seqlens": ints(0, 6), "kv_lengths": ints(6)}, "cu_seqlens and kv_start/kv_lengths"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 5)}, r"cu_seqlens: values \[0, 5\]; they must rise from 0 to T = 6"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 4, 3, 6)}, "cu_seqlens: values"),
    (ShapeError, PACKED | {"cu_seqlens": ints(1, 6)}, "cu_seqlens: values"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0)}, r"cu_seqlens: shape \(1,\); it must be \(N \+ 1,\)"),
    (ShapeError, PACKED | {"cu_seqlens": zeros(2)}, "cu_seqlens: dtype torch.float32"),
    *((ShapeError, {name: None}, f"{name}: None; it must be a tensor") for name in ("query", "key", "value")),
    *(
        (ShapeError, {name: x.to_sparse()}, f"{name}: layout sparse_coo; it must be strided: convert it with .to_dense")
        for name, x in {"query": zeros(2, 4, 5, 8), "lam": zeros(4), "attn_mask": zeros(5, 7).bool()}.items()
    ),
    (ShapeError, {"query": [[1.0]]}, "query: a list; it must be a tensor"),
    (ShapeError, {"value": 3}, "value: 3; it must be a tensor"),
    (ShapeError, {"lam": None}, "lam: None; it must be a float or a tensor"),
    (ShapeError, {"lam": [0.5] * 4}, "lam: a list; it must be a float or a tensor"),
    (ShapeError, {"attn_mask": [[True]]}, "attn_mask: a list; it must be a tensor"),
    (ShapeError, {"kv_start": [0, 0]}, "kv_start: a list; it must be a tensor"),
    (ShapeError, {"kv_lengths": 7}, "kv_lengths: 7; it must be a tensor"),
    (ShapeError, PACKED | {"cu_seqlens": [0, 6]}, "cu_seqlens: a list; it must be a tensor"),
    (ConfigError, {"window": 2.5, "is_causal": True}, "window: 2.5; it must be an int"),
    (ConfigError, {"window": [2], "is_causal": True}, "window: a list; it must be an int"),
    (ConfigError, {"window": True, "is_causal": True}, "window: True; it must be an int"),
    (ConfigError, {"is_causal": None}, "is_causal: None; it must be True or False"),
    (ConfigError, {"is_causal": "yes"}, "is_causal: a str; it must be True or False"),
    (ConfigError, {"scale": "big"}, "scale: a str; it must be a finite number"),
    (ConfigError, {"scale": torch.ones(2)}, "scale: a Tensor; it must be a finite number"),
    (ConfigError, {"scale": float("nan")}, "scale: nan; it must be a finite number"),
    *(
        (ShapeError, {name: x.to("meta")}, f"{name}: on meta, query is on cpu; move both to one device")
        for name, x in {"value": zeros(2, 2, 7, 6), "lam": zeros(4), "attn_mask": zeros(5, 7).bool()}.items()
    ),
    *(
        (ShapeError, {name: ints(0, 0).to("meta")}, f"{name}: on meta, query is on cpu; move both to one device")
        for name in ("kv_start", "kv_lengths")
    ),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 6).to("meta")}, "cu_seqlens: on meta, query is on cpu"),
]
REFUSED_NORMS = [
    (ShapeError, {"weight": zeros(6).to("meta")}, "weight: on meta, value is on cpu; move both to one device"),
    (ShapeError, {"weight": [1.0] * 6}, "weight: a list; it must be a tensor"),
    (ShapeError, {"weight": zeros(5)}, r"weight: shape \(5,\); it must be \(E,\) = \(6,\)"),
    *((ShapeError, {"weight": zeros(*shape)}, "weight: shape") for shape in ((), (1, 6), (2, 1, 6))),
    (ShapeError, {"value": zeros(2, 2, 6, 6)}, "value: shape"),
    (ConfigError, {"window": 3}, "window=3 needs"),
    (ShapeError, {"weight": zeros(6).long()}, "weight: dtype torch.int64; it must be floating"),
    (ShapeError, {"lam": None}, "lam: None; it must be a float or a tensor"),
    (ConfigError, {"eps": None}, "eps: None; it must be a finite number of at least 0"),
    (ConfigError, {"eps": -1.0}, "eps: -1.0; it must be"),
    (ConfigError, {"factor": "2"}, "factor: a str; it must be a finite number"),
]


@pytest.mark.parametrize(
    ("error", "changes", "words"), REFUSED_NORMS, ids=lambda x: None if isinstance(x, type) else ""
)
def test_refusals_of_the_norm(error, changes, words):
    arguments = {"lam": 0.5, "weight": zeros(6), "eps": 1e-5} | changes
    value = arguments.pop("value", zeros(2, 2, 7, 6))
    for backend in PLAIN:
        with pytest.raises(error, match=words) as caught:
            normed_differential_attention(zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), value, **arguments, backend=backend)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", [None, ["cpu"], 3])
def test_a_backend_that_is_no_name(backend):
    with pytest.raises(BackendUnavailable, match="no backend is named"):
        call(backend=backend)


@pytest.mark.parametrize(("error", "changes", "words"), REFUSED, ids=lambda x: None if isinstance(x, type) else "")
def test_refusals_say_what_to_do(error, changes, words):
    for backend in ("auto", *PLAIN):
        with pytest.raises(error, match=words) as caught:
            call(**changes, backend=backend)
        assert "\n" not in str(caught.value)


def test_the_call_that_refusals_change_is_valid():
    assert call().shape == (2, 4, 5, 6)
    assert call(**PACKED, cu_seqlens=ints(0, 6)).shape == (1, 2, 6, 8)


def test_softmax_and_maps_refuse_too():
    with pytest.raises(ShapeError, match=r"key: shape .* width = 8"):
        softmax_attention(zeros(1, 2, 5, 8), zeros(1, 2, 5, 4), zeros(1, 2, 5, 8))
    with pytest.raises(ShapeError, match="must be even"):
        attention_maps(zeros(1, 2, 5, 7), zeros(1, 2, 5, 7))
    with pytest.raises(ConfigError, match="window=2 needs"):
        softmax_maps(zeros(1, 2, 5, 8), zeros(1, 2, 5, 8), window=2)


@pytest.mark.parametrize("shared", [False, True], ids=["two keys", "one key"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_watched_inputs_are_those_of_the_maps(shared, scale):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 6, generator=generator)
    key, value = (
        torch.randn(2, 2, 7, 3 if shared else 6, generator=generator),
        torch.randn(2, 2, 7, 3, generator=generator),
    )
    seen = []
    with observe_inputs(lambda *inputs: seen.append(inputs)):
        found = differential_attention(query, key, value, 0.4, is_causal=True, scale=scale)
        softmax_attention(query[..., :3], key[..., :3], value, window=2, is_causal=True)
    assert torch.equal(differential_attention(query, key, value, 0.4, is_causal=True, scale=scale), found)
    assert len(seen) == 2
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(2)
    maps, restrictions, used = seen[0]
    assert restrictions.is_causal
    expected = attention_maps(query, key, is_causal=True, scale=scale)
    for (q, k), map_BHTS in zip(maps, expected, strict=True):
        logits = (used * q @ k.repeat_interleave(2, 1).mT).masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(logits.softmax(-1), map_BHTS)
    ((q, k),), restrictions, used = seen[1]
    assert (q.shape[-1], k.shape, restrictions.window, used) == (3, (2, 2, 7, 3), 2, 3**-0.5)


@pytest.mark.parametrize("name", ["reference", "mine"])
def test_the_backends_own_pass_is_taken_where_there_is_one(name, monkeypatch):
    calls = []

    def run(call):
        calls.append(call.norm)
        return call.value[:, :, :1]

    mine = dataclasses.replace(backends.BACKENDS["reference"], name="mine", run=run, norms=True)
    monkeypatch.setitem(backends.BACKENDS, "mine", mine)
    query, key, value, lam, _ = Case("x").inputs()
    weight = torch.ones(8)
    normed_differential_attention(query, key, value, lam, weight, eps=0.25, factor=3.0, backend=name)
    assert calls == ([(weight, 0.25, 3.0)] if name == "mine" else [])
