"""A made-up corpus, its shards and a recipe that trains on it in a second. Nothing here depends on the machine."""

import copy
import os
import random
import urllib.request

# The process that starts the others imports none of what they test, since they would wait for it.

# Each process of `pytest -n` gets one thread, unless the environment says otherwise: processes with as many threads as
# there are cores wait for one another. torch reads it when it is first imported. Tests of threads set their own number.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import yaml
from hypothesis import HealthCheck, settings

# A busy machine fails no test by its clock. Continuous integration draws the same examples each time, others draw new ones.
CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("here", derandomize=os.environ.get("DIFFTRANSFORMER_CI") == "1", **CALM)
settings.load_profile("here")


def pytest_configure(config):
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch

    # Without a GPU, Triton's kernels run in its interpreter: read when triton is first imported, so before what imports it.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("DIFFTRANSFORMER_SANITIZE"):
        # `make sanitize`: torch.empty gives NaN, and a backward pass that makes one names the forward call.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.autograd.set_detect_anomaly(True)


def pytest_collection_modifyitems(items):
    """Start the longest tests first, so that at the end no process waits for one."""
    items.sort(key=lambda item: -max((mark.kwargs.get("minutes", 0) for mark in item.iter_markers("slow")), default=0))


TOY = {
    "name": "toy",
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "data": {"tokenizer": "bpe", "vocab_size": 400, "needle_words": 50, "validation_share": 0.3},
    "training": {
        "steps": 8, "batch_tokens": 256, "context_stages": [[0, 64], [4, 128]],
        "retrieval": {"share": 0.5, "max_needles": 2, "asks": 2, "digits": 2}, "validate_every": 3,
        "validation_windows": 2, "checkpoint_every": 3, "optimizer": {"learning_rate": 0.002},
        "schedule": {"warmup_steps": 2},
    },
    "evaluation": [
        {"task": "perplexity", "options": {"text": "validation", "spread": True, "windows": 4, "position_buckets": 8}},
        {
            "task": "needle",
            "options": {
                "text": "validation", "cities": "apart", "paired": False, "lengths": [], "digits": 2, "documents": 3,
                "needles": [[1, 1], [2, 1]], "depths": [0.0, 1.0],
            },
        },
        {
            "task": "allocation",
            "options": {
                "text": "validation", "cities": "seen", "paired": False, "digits": 2, "documents": 3, "needles": 2,
                "depths": [0.5],
            },
        },
    ],
    "compare": {"seeds": 2, "jobs": 1},
}  # fmt: skip


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory):
    """A folder of 40 small text files."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(5)
    words = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randint(2, 9))) for _ in range(300)]
    for index in range(40):
        lines = (" ".join(draw.choices(words, k=draw.randint(3, 10))) + "\n" for _ in range(40))
        (folder / f"{index:02d}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def _toy_shards_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toy-shards")


@pytest.fixture
def toy(toy_text, _toy_shards_folder):
    """The toy recipe as plain data, to be changed freely."""
    document = copy.deepcopy(TOY)
    document["data"] |= {"source": str(toy_text), "folder": str(_toy_shards_folder)}
    return document


@pytest.fixture
def toy_recipe(toy):
    """The toy recipe."""
    from difftransformer_lab.studies import recipe_from

    return recipe_from(toy, source="toy")


@pytest.fixture
def toy_file(toy, tmp_path):
    """The toy recipe as a YAML file."""
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def toy_shards(toy_text, _toy_shards_folder):
    """The toy recipe's shards."""
    from difftransformer.data import DataConfig, prepare_shards

    return prepare_shards(DataConfig(**TOY["data"], source=str(toy_text), folder=str(_toy_shards_folder)))


@pytest.fixture
def wide_alone():
    """Figures have no narrow form, since drawing is most of a page's time."""
    from difftransformer_lab import plots

    token = plots.WIDE_ALONE.set(True)
    yield
    plots.WIDE_ALONE.reset(token)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made, and not drawn."""
    monkeypatch.setattr("difftransformer_lab.plots._svg", lambda figure: "<svg></svg>")


@pytest.fixture
def fails(capsys):
    """Run a command that must exit with 2 and say why in one line on standard error, and return that line."""
    from difftransformer_lab.cli.main import main

    def run(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1, said.err
        assert "Traceback" not in said.err + said.out
        return said.err.removesuffix("\n")

    return run


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.tools)])
def store(request, tmp_path, monkeypatch):
    """The URL of an empty folder in a store. What is copied from there goes to a folder of the test."""
    import fsspec

    monkeypatch.setattr("difftransformer.data.shards.copies", lambda: tmp_path / "copies")
    monkeypatch.setattr("difftransformer.data.bpe.copies", lambda: tmp_path / "copies")
    if request.param == "s3":
        pytest.importorskip("s3fs")
        server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": address, "key": "any", "secret": "any"})
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/folder"
        server.stop()
    elif request.param == "local":
        yield f"file://{tmp_path / 'store' / 'folder'}"
    else:
        fsspec.filesystem("memory").store.clear()
        yield "memory://bucket/folder"


@pytest.fixture
def warm_children(monkeypatch):
    """The package's own processes start with torch loaded, which takes half of their seconds. Memory is not to be measured."""
    from tests.support import fresh

    for module in ("studies.costs", "studies.jobs"):
        monkeypatch.setattr(f"difftransformer_lab.{module}.start_child", fresh.start_child)
