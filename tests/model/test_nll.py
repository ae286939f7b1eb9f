"""The chunked loss against PyTorch's cross-entropy over whole logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from difftransformer.data.documents import IGNORED
from difftransformer.errors import ConfigError, DataError, ShapeError
from difftransformer.families import family_config
from difftransformer.model import nll
from difftransformer.model.nll import loss_chunk, next_token_nll, summed_next_token_nll, summed_nll
from tests.support.oracle import relative_error
from tests.support.tiny_models import BASE, scramble, tiny, tokens

EPS = torch.finfo(torch.float32).eps


def _case(dtype=torch.float64, rows=37, width=24, vocabulary=301):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64)
    targets = torch.randint(vocabulary, (rows,), generator=draw)
    targets[::5] = IGNORED
    return hidden.to(dtype), weight.to(dtype), targets


def _whole(hidden, weight, targets):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = F.cross_entropy((hidden @ weight.T).float() if hidden.dtype != torch.float64 else hidden @ weight.T, targets)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def _chunked(hidden, weight, targets, chunk_tokens):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = summed_nll(hidden, weight, targets, chunk_tokens=chunk_tokens) / (targets != IGNORED).sum()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 8, 36, 37, 500])
def test_equals_whole_logits(chunk_tokens):
    """Sums in another order have another rounding, of the size of that of whole logits."""
    exact, plain, own = _whole(*_case()), _whole(*_case(torch.float32)), _chunked(*_case(torch.float32), chunk_tokens)
    for value, rounded, expected in zip(own, plain, exact, strict=True):
        assert relative_error(value, expected) < 4 * max(relative_error(rounded, expected), EPS)


def test_low_precision():
    exact, plain, own = _whole(*_case()), _whole(*_case(torch.bfloat16)), _chunked(*_case(torch.bfloat16), 8)
    for value, rounded, expected in zip(own, plain, exact, strict=True):
        assert value.dtype == rounded.dtype
        assert relative_error(value, expected) <= 2 * relative_error(rounded, expected)


def test_large_logits_stay_finite():
    hidden, weight, targets = _case(torch.float32)
    value, hidden_grad, weight_grad = _chunked(1e4 * hidden, weight, targets, 8)
    assert relative_error(value, _whole(1e4 * hidden.double(), weight.double(), targets)[0]) < 1e-6
    assert hidden_grad.isfinite().all()
    assert weight_grad.isfinite().all()


def test_without_gradient():
    hidden, weight, targets = _case(torch.float32)
    weight.requires_grad_()
    with torch.no_grad():
        value = summed_nll(hidden, weight, targets, chunk_tokens=8)
    assert not value.requires_grad
    assert value.item() == pytest.approx(F.cross_entropy(hidden @ weight.T, targets, reduction="sum").item(), rel=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 50}, {"shift_labels": tokens(2, 24, seed=3)}])
def test_model_with_labels(extra, autocast):
    model, ids = tiny().train(), tokens(2, 24)
    labels = ids.masked_fill(torch.arange(24) < 5, IGNORED)
    results = []
    for one, chunk in ((copy.deepcopy(model).double(), None), (model, None), (model, 7)):
        one.loss_chunk_tokens = chunk
        one.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and one is model):
            output = one(ids, labels=labels, **extra)
        assert (output.logits is None) == (chunk is not None)
        output.loss.backward()
        results.append((output.loss.detach(), torch.cat([p.grad.flatten() for p in one.parameters()])))
    for expected, rounded, value in zip(*results, strict=True):
        assert relative_error(value, expected) < 4 * max(relative_error(rounded, expected), EPS)
    assert model(ids).logits is not None


@pytest.mark.parametrize("family", [None, "qwen3"])
def test_logits_are_there_unless_training_asks_otherwise(family):
    """Evaluation with labels, as by Trainer.predict, has them although a chunk is set; a loss alone is asked for by name."""
    model, ids = tiny(), tokens(2, 24)
    if family is not None:
        fields = BASE | {"num_key_value_heads": 2, "head_dim": 8}
        model = scramble(AutoModelForCausalLM.from_config(family_config(family)(**fields))).eval()
    expected = model(ids).logits
    model.loss_chunk_tokens = 7
    losses = []
    for training, skips, has_logits in (
        (False, None, True), (True, None, False), (False, True, False), (True, False, True),
    ):  # fmt: skip
        output = model.train(training)(input_ids=ids, labels=ids, skip_logits=skips)
        assert (output.logits is not None) == has_logits
        assert not has_logits or torch.equal(output.logits, expected)
        losses.append(output.loss.item())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_logits_of_one_chunk_are_in_memory():
    hidden, weight, targets = _case(torch.float32, rows=512, width=8, vocabulary=4000)
    logits_bytes = 4 * 512 * 4000
    peaks = [_most_live_bytes(run, hidden, weight, targets) for run in (_whole, lambda *case: _chunked(*case, 32))]
    assert peaks[0] > 2 * logits_bytes  # logits and their gradient
    assert peaks[1] < 0.4 * peaks[0]


def _most_live_bytes(run, *case):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(*case)
    live, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def test_chunk_is_chosen_by_size():
    assert loss_chunk(2048, 1024, "cpu") is None
    assert loss_chunk(2048, 1025, "cpu") == 256
    assert loss_chunk(2048, 1025, "cuda") is None
    assert loss_chunk(4096, 20_000, "mps") == 1024
    assert loss_chunk(4096, 100_288, "cuda") == 1024


def test_refusal():
    with pytest.raises(ConfigError, match="chunk_tokens=0"):
        summed_nll(*_case(), chunk_tokens=0)


def test_labels_of_another_number_of_tokens_are_refused():
    """As the loss of whole logits refuses them, where logits of some tokens alone are asked for."""
    model, ids = tiny(), tokens(2, 24)
    with pytest.raises(ValueError, match="batch_size"):
        model(ids, labels=ids, logits_to_keep=5)
    model.train().loss_chunk_tokens = 7
    with pytest.raises(ShapeError, match=r"^targets have shape \(2, 24\), expected \(2, 5\)") as error:
        model(ids, labels=ids, logits_to_keep=5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("chunk_tokens", [8, 500])
def test_z_loss_equals_that_of_whole_logits(chunk_tokens):
    hidden, weight, targets = _case()

    def gradients(loss_of):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = loss_of(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def whole(hidden, weight):
        logits = hidden @ weight.T
        squares = logits.logsumexp(-1)[targets != IGNORED].square()
        return F.cross_entropy(logits, targets, reduction="sum") + 0.01 * squares.sum()

    found = gradients(lambda h, w: summed_nll(h, w, targets, chunk_tokens=chunk_tokens, z_loss=0.01))
    for value, expected in zip(found, gradients(whole), strict=True):
        assert relative_error(value, expected) < 1e-6
    model, ids = tiny().train(), tokens(2, 24)
    logits, targets = model(ids[:, :-1]).logits, ids[:, 1:].masked_fill(torch.arange(23) < 5, IGNORED)
    plain = summed_next_token_nll(model, ids[:, :-1], targets)
    for chunk in (None, 7):
        model.loss_chunk_tokens = chunk
        added = summed_next_token_nll(model, ids[:, :-1], targets, z_loss=0.5) - plain
        assert relative_error(added, 0.5 * logits[:, 5:].logsumexp(-1).square().sum()) < 1e-5


class Adapted(nn.Linear):
    """What an adapter makes of an output layer: its weight is the layer's, and its output is not."""

    def forward(self, x):
        return super().forward(x) + 3 * x[..., :1]


@pytest.mark.parametrize("family", [None, "qwen3", "granite"])
def test_z_loss_of_logits_that_are_more_than_one_product(family):
    """Of an adapted output layer, or scaled by the family."""
    model, ids = tiny(), tokens(2, 24)
    if family is not None:
        fields = BASE | {"num_key_value_heads": 2, "head_dim": 8, "logits_scaling": 2.0}
        model = scramble(AutoModelForCausalLM.from_config(family_config(family)(**fields)))
    if family != "granite":
        model.lm_head.__class__ = Adapted
    logits = model(ids[:, :-1]).logits.double()
    whole = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    for chunk in (None, 7):
        model.loss_chunk_tokens = chunk
        assert relative_error(model(input_ids=ids, labels=ids).loss, whole / 46) < 1e-6
        for z_loss in (0.0, 0.5):
            found = summed_next_token_nll(model, ids[:, :-1], ids[:, 1:], z_loss=z_loss)
            assert relative_error(found, whole + z_loss * logits.logsumexp(-1).square().sum()) < 1e-6


@pytest.mark.parametrize("label", [301, -1, -5])
def test_labels_out_of_range_are_refused_as_by_cross_entropy(label):
    hidden, weight, targets = _case(torch.float32)
    targets[-1] = label
    with pytest.raises(IndexError):
        F.cross_entropy(hidden @ weight.T, targets)
    with pytest.raises(DataError, match=f"^label {label}: give ids from 0 to 300, or -100"):
        summed_nll(hidden, weight, targets, chunk_tokens=8)
    with pytest.raises(DataError, match="or -7 for"):
        summed_nll(hidden, weight, targets, chunk_tokens=8, ignore_index=-7)
    assert summed_nll(hidden, weight, targets.clamp(0, 300), chunk_tokens=8, ignore_index=-1).isfinite()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of dynamo
def test_labels_are_checked_inside_a_compiled_graph():
    hidden, weight, targets = _case(torch.float32)
    checked = torch.compile(lambda t: summed_nll(hidden, weight, t, chunk_tokens=64), backend="eager", fullgraph=True)
    torch.testing.assert_close(checked(targets), summed_nll(hidden, weight, targets, chunk_tokens=64))
    with pytest.raises(RuntimeError, match="a label is neither an id below 301 nor -100"):
        checked(targets.clamp_min(-1))


def test_training_and_validation_take_the_chunked_path():
    """The sum over a batch, with tokens left out and positions given, by both paths."""
    model, ids = tiny().train(), tokens(2, 24)
    inputs, targets = ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(23) < 5, IGNORED)
    positions = torch.arange(3, 26).unsqueeze(0)
    expected = next_token_nll(model, inputs, targets, position_ids=positions).sum()
    assert not torch.allclose(expected, next_token_nll(model, inputs, targets * 0 + 7).sum())
    for chunk in (None, 7):
        model.loss_chunk_tokens = chunk
        found = summed_next_token_nll(model, inputs, targets, position_ids=positions)
        assert relative_error(found.detach(), expected.detach()) < 1e-6


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_and_gradient_of_a_chunk(z_loss):
    """What a GPU compiles, against cross_entropy and autograd in float64."""
    logits = 3 * torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, -100, 0, 10, 3])
    log_z = logits.logsumexp(-1)[targets != -100]
    right = F.cross_entropy(logits, targets, reduction="sum") + z_loss * log_z.square().sum()
    (right_gradient,) = torch.autograd.grad(right, logits)
    for compute in (nll.loss_and_gradient, torch.compile(nll.loss_and_gradient, fullgraph=True, backend="aot_eager")):
        loss, gradient = compute(logits.detach().float(), targets, -100, z_loss)
        assert loss.item() == pytest.approx(right.item(), rel=1e-5)
        assert torch.allclose(gradient.double(), right_gradient, atol=1e-5)
