"""Several processes train as one: the same weights at the start, the same losses and gradient norms, on every mesh."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from difftransformer.data import Example, id_tokenizer
from difftransformer.train import read_metrics
from difftransformer.train.parallel import ALONE
from tests.support import parallel_steps
from tests.support.checkpoint_tensors import tensors_of
from tests.support.parallel_steps import VARIANTS
from tests.support.shards import write_shards

STEPS = 12
LAYOUTS = {
    "one": (1, {}),
    "ddp": (2, {"data": {"replicate": 2}}),
    "fsdp": (2, {"data": {"shard": 2}}),
    "tensor": (2, {"tensor": 2}),
    "ulysses": (2, {"context": 2}),
    "hsdp": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp x tensor": (4, {"data": {"shard": 2}, "tensor": 2}),
    "tensor x ulysses": (4, {"tensor": 2, "context": 2}),
}


def train(folder, shards, layout, steps=STEPS, **options):
    """Run a layout in processes of its own, or in this one."""
    count, degrees = LAYOUTS[layout]
    if count == 1:
        parallel_steps.run(folder, shards, steps, layout=degrees, processes=ALONE, **options)
        return
    parallel_steps.run_layout(count, folder, shards, steps, layout=degrees, **options)


def figures(run):
    """Losses and gradient norms of the steps, and validation losses."""
    steps, validations = read_metrics(run / "metrics.jsonl")
    lines = torch.tensor([[line.loss_nats, line.gradient_norm] for line in steps], dtype=torch.float64)
    return lines, torch.tensor([line.validation_loss_nats for line in validations], dtype=torch.float64)


def assert_equal_runs(found, expected, steps=STEPS):
    for tensor, reference in zip(figures(found), figures(expected), strict=True):
        assert tensor.shape == reference.shape
        torch.testing.assert_close(tensor, reference, rtol=1e-5, atol=0)
    lines, _ = figures(expected)
    assert len(lines) == steps
    assert lines[-1, 0] < lines[0, 0]


@pytest.fixture(scope="module")
def shards(toy_shards):
    return toy_shards.folder


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """layout -> the folder of its runs, which are made once."""
    base = tmp_path_factory.mktemp("layouts")

    def folder(layout):
        if not (base / layout).exists():
            train(base / layout, shards, layout, keep_checkpoints=9)
        return base / layout

    return folder


def test_two_processes_train_as_one(shards, tmp_path):
    """With accumulation, whose parts are other rows on two processes."""
    options = {"accumulation": 2, "context_stages": [[0, 32]]}
    for layout in ("one", "fsdp"):
        train(tmp_path / layout, shards, layout, steps=6, variants=["diff"], **options)
    initial = [load_file(tmp_path / layout / "diff" / "initial.safetensors") for layout in ("one", "fsdp")]
    assert all(torch.equal(initial[1][name], tensor) for name, tensor in initial[0].items())
    assert_equal_runs(tmp_path / "fsdp" / "diff", tmp_path / "one" / "diff", steps=6)
    states = [tmp_path / layout / "diff" / "checkpoints" / "step-000006" for layout in ("one", "fsdp")]
    assert (states[0] / "config.json").read_bytes() == (states[1] / "config.json").read_bytes()
    alone, divided = map(tensors_of, states)
    assert alone.keys() == divided.keys()
    for key in alone:
        torch.testing.assert_close(divided[key], alone[key], rtol=1e-3, atol=1e-6, msg=key)
    model = AutoModelForCausalLM.from_pretrained(states[1])  # a Hugging Face folder on any mesh
    for key, weight in model.named_parameters():
        assert torch.equal(weight, divided[key]), key


@pytest.mark.slow
def test_muon_on_two_processes(shards, tmp_path):
    """Its iteration multiplies in bf16, whose sums are in another order on two processes."""
    runs = {"one": "muon", "fsdp": "muon", "adamw": "adamw"}
    for name, method in runs.items():
        layout = "one" if name == "adamw" else name
        train(tmp_path / name, shards, layout, steps=6, variants=["diff"], method=method, context_stages=[[0, 32]])
    alone, divided, adamw = (figures(tmp_path / name / "diff")[0][:, 0] for name in runs)
    torch.testing.assert_close(divided, alone, rtol=2e-4, atol=0)
    assert (adamw - alone).abs().max() > 10 * (divided - alone).abs().max()


ACCUMULATION = {
    "one": 4,
    "fsdp": 2,
    "ulysses": 4,
}  # of packed rows, of which a process has some, or a part of the one row


@pytest.mark.slow
def test_packed_documents_train_as_one(shards, tmp_path):
    for name, parts in ACCUMULATION.items():
        options = {"accumulation": parts, "context_stages": [[0, 64]], "pack_documents": True}
        train(tmp_path / name, shards, name, steps=6, variants=["diff", "diff_v2"], **options)
        for variant in ("diff", "diff_v2"):
            assert_equal_runs(tmp_path / name / variant, tmp_path / "one" / variant, steps=6)


@pytest.mark.slow
def test_examples_train_as_one(tmp_path):
    """Their targets that count are few, and not equally many on the processes."""
    draw, examples = np.random.default_rng(0), []
    for index in range(40):
        size = int(draw.integers(2, 64))
        inputs = draw.integers(0, 50, size)
        targets = np.where(np.arange(size) < (size - 2 if index % 4 else 1), -100, (inputs + 1) % 50)
        examples.append(Example(str(index), inputs, targets))
    write_shards(tmp_path / "shards", examples, examples, id_tokenizer(50))
    for name, parts in ACCUMULATION.items():
        options = {"context_stages": [[0, 64]], "pack_documents": True, "retrieval": None, "accumulation": parts}
        train(tmp_path / name, tmp_path / "shards", name, steps=10, variants=["diff"], **options)
        assert_equal_runs(tmp_path / name / "diff", tmp_path / "one" / "diff", steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_trains_as_one_process(layout, trained):
    for variant in VARIANTS:
        run, alone = trained(layout) / variant, trained("one") / variant
        assert_equal_runs(run, alone)
        start, expected = load_file(run / "initial.safetensors"), load_file(alone / "initial.safetensors")
        assert start.keys() == expected.keys()
        assert all(torch.equal(start[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("fsdp", "fsdp"), ("fsdp", "one"), ("fsdp", "fsdp x tensor"), ("one", "tensor")]
)
def test_goes_on_with_another_mesh(before, after, trained, shards, tmp_path):
    variants = ["diff", "grouped_diff"]
    for variant in variants:
        shutil.copytree(trained(before) / variant, tmp_path / variant)
        shutil.rmtree(tmp_path / variant / "checkpoints" / f"step-{STEPS:06d}")
    train(tmp_path, shards, after, variants=variants)
    for variant in variants:
        run, whole = tmp_path / variant, trained(before) / variant
        assert_equal_runs(run, whole)
        found, expected = (tensors_of(at / "checkpoints" / f"step-{STEPS:06d}") for at in (run, whole))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected) == (before == after)
        if before == after:
            assert all(map(torch.equal, figures(run), figures(whole)))


@pytest.mark.slow
def test_recomputed_activations_chunked_loss_and_bf16(trained, shards, tmp_path):
    """Recomputing changes no bit; bf16 differs from one process as the order of its sums does."""
    few = {"variants": ["diff"]}
    low = {"precision": "bf16", "gradient_checkpointing": "selective", **few}
    exact, _ = figures(trained("one") / "diff")
    for how in (True, "selective"):
        train(tmp_path / str(how), shards, "one", gradient_checkpointing=how, **few)
        found, _ = figures(tmp_path / str(how) / "diff")
        assert torch.equal(found, exact)
    train(tmp_path / "alone", shards, "one", **low)
    alone, _ = figures(tmp_path / "alone" / "diff")
    assert not torch.equal(alone, exact)
    for layout in ("fsdp", "tensor"):
        train(tmp_path / layout / "chunks", shards, layout, loss_chunk_tokens=24, **few)
        assert_equal_runs(tmp_path / layout / "chunks" / "diff", trained("one") / "diff")
        train(tmp_path / layout / "bf16", shards, layout, **low)
        divided, _ = figures(tmp_path / layout / "bf16" / "diff")
        torch.testing.assert_close(divided, alone, rtol=2e-3, atol=0)
