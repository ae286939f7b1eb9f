"""The benchmark of a GPU without one: its steps, its clock, its tables; and one small run where there is a GPU."""

import contextlib
import dataclasses
import json
import warnings

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend

from difftransformer.ops import BACKENDS
from difftransformer_lab.bench import Settings, sort_rows, steps_of, time_attention, time_interleaved, time_training
from difftransformer_lab.bench import attention as attention_module
from difftransformer_lab.bench import steps as steps_module
from difftransformer_lab.bench import timing as timing_module
from difftransformer_lab.bench import training as training_module
from difftransformer_lab.bench.attempt import LONGEST_REASON, Failure, attempt, attempt_each
from difftransformer_lab.bench.defaults import DEFAULTS, GPU_CALL_TOKENS, GPU_HIDDEN_SIZE
from difftransformer_lab.bench.roofline import Peak, peak_of
from difftransformer_lab.bench.timing import Prepared
from difftransformer_lab.bench.work import DETERMINISTIC, attention_work, deterministically, draw, pinned, training_work
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.bench import bench_tables, print_bench
from difftransformer_lab.report.bench_figures import draw_attention
from difftransformer_lab.results import (
    AttentionShape,
    AttentionSkip,
    AttentionTiming,
    Bench,
    Environment,
    TrainingSkip,
    TrainingTiming,
    read_result,
    write_result,
)

H200 = "NVIDIA H200"


def shape(mode="forward", length_tokens=16, heads=2, head_dim=8, dtype="bf16", batch=3):
    return AttentionShape(
        dtype=dtype, mode=mode, length_tokens=length_tokens, heads=heads, head_dim=head_dim, batch=batch
    )


@pytest.fixture
def gpu_backends(monkeypatch):
    """Take every backend for one that runs on a GPU, except the CPU's."""
    for name in ("triton", "flash", "flex"):
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(BACKENDS["chunked"], name=name))


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Run what a GPU would run, with tensors on the CPU and its clock."""
    monkeypatch.setattr(attention_module, "draw", lambda shape, _: draw(shape, "cpu"))
    monkeypatch.setattr(attention_module, "wait_for", lambda _: None)
    monkeypatch.setattr(timing_module, "_device_clock", lambda _: timing_module._host_clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H200)


def gpu_bench(rows):
    where = Environment(**dict.fromkeys(("difftransformer", "python", "torch", "transformers", "platform"), "x"),
                        processor="x", device=H200, threads=1)  # fmt: skip
    return Bench(command="", created="", environment=where, foreign_cpu_share=None, **sort_rows(rows, by_width=True))


def test_the_steps_for_a_gpu():
    """16,384 tokens a call and heads of 2,048 together; three passes; decoding to 131,072 keys; two models at two lengths."""
    steps = steps_of("all", Settings(device="cuda"))
    labels = [step.label for step in steps]
    lengths = ((8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768), (1, 65536))
    words = [f"{f'b={batch} ' if batch > 1 else ''}n={n}" for batch, n in lengths]
    assert labels[:36] == [
        f"bf16 {mode} {size} h={h} d={d}"
        for mode in ("forward", "backward", "forward+backward") for size in words for h, d in ((16, 64), (8, 128))
    ]  # fmt: skip
    assert labels[36:44] == [
        f"bf16 decode b=8 n={n} h={h} d={d}" for n in (4096, 16384, 65536, 131072) for h, d in ((16, 64), (8, 128))
    ]
    assert "memory of diff triton, bf16 forward+backward n=65536 h=16 d=64" in labels
    assert labels[-4:] == [
        f"training step of {model}, bf16 n={n}" for model in ("125M", "350M") for n in (2048, 4096)
    ]  # fmt: skip
    assert all(step.expected_seconds > 0 for step in steps)
    assert [step.label for step in steps_of("train", Settings())] == [
        step.label for step in steps_of("training", Settings())
    ]
    size = DEFAULTS["cuda"].size
    assert all(size(n, 64).batch * n == GPU_CALL_TOKENS for n in (2048, 4096, 8192, 16384))
    assert all(size(2048, d).heads * 2 * d == GPU_HIDDEN_SIZE for d in (32, 64, 128, 256))


def test_who_takes_part_on_a_gpu(gpu_backends):
    """The deterministic backward only where there is one; PyTorch's two kernels; what is slow or large is left out."""
    everyone = {"torch sdpa", "torch cudnn", "softmax triton", "diff triton", "normed triton", "diff flash", "diff flex",
                "diff sdpa", "DiffLlama sdpa"}  # fmt: skip
    reasons = attention_module._implementations(shape(length_tokens=32768), "cuda", None, True)
    assert {name for name, reason in reasons.items() if reason is None} == everyone
    assert "many times as long as the others: above 16,384 tokens only where --backends" in reasons["diff chunked"]
    assert "O(n^2) memory" in reasons["diff reference"]
    assert "budget" in reasons["DiffLlama eager"]
    assert "diff cpu" in reasons
    reasons = attention_module._implementations(shape("backward", 32768), "cuda", ["chunked", "triton"], True)
    assert reasons["diff triton"] is reasons["diff triton deterministic"] is reasons["diff chunked"] is None
    reasons = attention_module._implementations(shape("decode", 65536), "cuda", None, True)
    assert not any("deterministic" in name or "DiffLlama" in name or "normed" in name for name in reasons)


@pytest.mark.parametrize("mode", ["forward", "backward", "decode"])
def test_the_whole_way_on_the_wrong_device(mode, cpu_as_gpu, monkeypatch):
    """Real calls; a kernel that is not there is left out."""
    if "triton" in BACKENDS:
        monkeypatch.delitem(BACKENDS, "triton")
    rows = time_attention(shape(mode), device="cuda", backends=["chunked", "sdpa"], rounds=3, budget_seconds=0.0)
    timed = {row.implementation: row for row in rows if isinstance(row, AttentionTiming)}
    peers = set() if mode == "decode" else {"DiffLlama sdpa", "DiffLlama eager"}
    assert timed.keys() == {"torch sdpa", "torch cudnn", "diff chunked", "diff sdpa"} | peers
    assert all(row.teraflops_per_second > 0 and row.time_over_roofline > 0 for row in timed.values())
    reasons = {row.implementation: row.reason for row in rows if isinstance(row, AttentionSkip)}
    assert reasons["softmax triton"] == "there is no such backend here"


def test_rates_by_hand():
    """2 ms for 2 rows of 1,024 tokens, 4 heads, d = 8: 4 units of n n d forward; both maps in one kernel take 6 units."""
    work = shape(length_tokens=1024, heads=4, batch=2)
    flops, moved = 4 * (1024 * 1024 * 8) * 4 * 2, 4 * 2 * 4 * 1024 * 16 * 2
    for name, least, over in (
        ("torch sdpa", 1.0, 1), ("torch cudnn", 1.0, 1), ("diff triton", 1.5, 1), ("diff flex", 1.5, 1),
        ("diff sdpa", 1.5, 8 / 6), ("diff flash", 1.5, None),
    ):  # fmt: skip
        found = attention_module.rates(work, name, 2e-3, Peak(1e12, 1e12))
        assert found["teraflops_per_second"] == pytest.approx(flops / 2e-3 / 1e12)
        assert found["terabytes_per_second"] == pytest.approx(moved / 2e-3 / 1e12)
        assert found["time_over_roofline"] == pytest.approx(2e-3 / (least * flops / 1e12))
        assert found["work_over_least"] == (over and pytest.approx(over))
    assert attention_module.rates(work, "torch sdpa", 2e-3, None)["time_over_roofline"] is None


def test_peaks_are_of_known_devices():
    assert peak_of(H200, "bf16") == peak_of(H200, "fp16") == Peak(989e12, 4.8e12)
    assert peak_of(H200, "fp32") is None
    assert peak_of("a device of tomorrow", "bf16") is None


def test_what_fails_on_a_gpu_is_left_out():
    """One implementation's error is its reason; without the base there are no ratios, and every row says so."""

    def build(name):
        if name in failing:
            raise torch.OutOfMemoryError(f"no room for {name}\nand so on")
        return name

    failing = {"b"}
    built, reasons = attempt_each("abc", build, base="a", device="cuda")
    assert (built, reasons) == ({"a": "a", "c": "c"}, {"b": "OutOfMemoryError: no room for b"})
    with pytest.raises(torch.OutOfMemoryError):
        attempt_each("abc", build, base="a", device="cpu")
    failing = {"a", "b"}
    built, reasons = attempt_each("abc", build, base="a", device="cuda")
    assert built == {}
    assert reasons["b"] == "OutOfMemoryError: no room for b"
    assert reasons["c"] == "a, which ratios refer to, did not run (OutOfMemoryError: no room for a)"


def test_no_room_for_the_inputs(gpu_backends, cpu_as_gpu, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("no room for the inputs")

    monkeypatch.setattr(attention_module, "draw", no_room)
    rows = time_attention(shape(), device="cuda", peers=False, rounds=3, budget_seconds=1.0)
    assert all(isinstance(row, AttentionSkip) for row in rows)
    assert "no room for the inputs" in next(row.reason for row in rows if row.implementation == "diff triton")


def test_a_failure_says_why_in_one_line():
    """PyTorch says in warnings why a kernel does not fit, in the error only that none does."""

    def call():
        warnings.warn("no such kernel for this width", stacklevel=1)
        warnings.warn("no such kernel for this width", stacklevel=1)
        raise RuntimeError("No available kernel.\n  at file.cpp")

    assert attempt(call) == Failure("RuntimeError: No available kernel.; no such kernel for this width")
    assert attempt(lambda: 7) == 7

    def long():
        raise ValueError("x" * 999)

    assert len(attempt(long).reason) == LONGEST_REASON


def test_the_device_clock(monkeypatch):
    """Each call follows a fill, between two events; what a timed part needs is made before; nothing is read before the end
    of a round."""
    log, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")
            self.at = now[0]

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    class Fill:
        def zero_(self):
            log.append("fill")
            now[0] += 100.0

    def work(name, seconds):
        def call():
            log.append(name)
            now[0] += seconds

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing_module.torch, "empty", lambda *_, **__: Fill())
    candidates = {"a": work("a", 2.0), "b": Prepared(work("make", 50.0), lambda _: work("b", 3.0)())}
    times = time_interleaved(candidates, rounds=3, warmup=0, device="cuda")
    assert log == ["fill", "event", "a", "event", "make", "fill", "event", "b", "event", "wait", "wait"] * 3
    assert {name: timing.median_seconds for name, timing in times.items()} == pytest.approx({"a": 2.0, "b": 3.0})


@pytest.mark.parametrize("implementation", ["diff chunked", "diff sdpa", "softmax chunked", "torch sdpa", "normed chunked",
                                            "DiffLlama sdpa", "diff chunked" + DETERMINISTIC])  # fmt: skip
@pytest.mark.parametrize("mode", ["forward", "backward", "forward+backward"])
def test_work_in_batches(implementation, mode, monkeypatch):
    """Batches of shared numbers; the backward pass alone leaves its forward pass to the part that is not timed."""
    asked = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *arguments: asked.append(arguments) or grad(*arguments))
    data = draw(shape(), "cpu")
    work = attention_work(implementation, shape(mode), "cpu", data)
    if mode == "backward":
        assert isinstance(work, Prepared)
        out = work.prepare()
        assert not asked
        assert work.use(out) is out
    else:
        out = work()
    assert out.numel() == 3 * 16 * 2 * 2 * 8
    assert out.shape[0] == 3
    assert out.requires_grad is (mode != "forward")
    assert len(asked) == (mode != "forward")
    if asked:
        shared = {x.untyped_storage().data_ptr() for x in asked[0][1]}
        assert {x.untyped_storage().data_ptr() for x in data} <= shared
    assert not any(x.requires_grad for x in data)


def test_the_backward_pass_can_be_repeated():
    """Every call has a graph of its own: PyTorch frees one that has been used."""
    work = attention_work("diff chunked", shape("backward"))
    times = time_interleaved({"a": work}, rounds=3)
    assert times["a"].rounds == 3


def test_determinism_is_asked_for_and_put_back():
    """The switch is on in both passes, without the filling of memory that comes with it."""
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    with deterministically():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not memory.fill_uninitialized_memory
    assert (torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory) == before


def test_pytorch_is_pinned_to_one_kernel(monkeypatch):
    """By what PyTorch itself would say it may choose from."""

    def allowed():
        cuda = torch.backends.cuda
        return {
            SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: cuda.math_sdp_enabled(),
            SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        }

    for name, dtype, backend in (
        ("sdpa", "bf16", SDPBackend.FLASH_ATTENTION),
        ("sdpa", "fp16", SDPBackend.FLASH_ATTENTION),
        ("sdpa", "fp32", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", "bf16", SDPBackend.CUDNN_ATTENTION),
    ):
        with pinned(name, dtype, "cuda"):
            assert [choice for choice, enabled in allowed().items() if enabled] == [backend]
    free = allowed()
    with pinned("sdpa", "bf16", "cpu"):
        assert allowed() == free


@pytest.fixture
def small_models(monkeypatch):
    """Both devices train a model of one layer."""
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for device in ("cpu", "cuda"):
        changed = {"models": {"toy": small}, "training_tokens": 64, "training_contexts_tokens": (16, 32)}
        monkeypatch.setitem(DEFAULTS, device, dataclasses.replace(DEFAULTS[device], **changed))


def test_training_steps_in_low_precision(small_models):
    """Autocast reaches the attention: flash takes nothing else than bf16 and fp16."""
    seen = []
    honest = torch.nn.functional.scaled_dot_product_attention
    config = training_module.DiffTransformerConfig(
        attention_type="softmax", attn_backend="sdpa", **DEFAULTS["cpu"].models["toy"]
    )
    model = training_module.DiffTransformerForCausalLM(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda q, k, v, **options: seen.append((q.dtype, k.dtype, v.dtype, options["attn_mask"], options["is_causal"]))
            or honest(q, k, v, **options),
        )  # fmt: skip
        for dtype in ("bf16", "fp16"):
            training_work(model, 2, 16, dtype)()
    assert seen == [
        (torch.bfloat16,) * 3 + (None, True),
        (torch.float16,) * 3 + (None, True),
    ]


def test_training_on_a_gpu_has_peaks(small_models, cpu_as_gpu, monkeypatch):
    """The step is pinned and weighed against what was there before its model; rows make up the tokens of a step."""
    asked, failing = [], set()

    def to(self, _):
        if self.config.attn_backend in failing:
            raise torch.OutOfMemoryError("no room")
        return self

    monkeypatch.setattr(training_module.DiffTransformerForCausalLM, "to", to)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(training_module, "device_peak_bytes", lambda step, before: (step(), 100 + before)[1])
    monkeypatch.setattr(training_module, "pinned", lambda *words: asked.append(words) or contextlib.nullcontext())
    rows = time_training("toy", "bf16", device="cuda", context_tokens=32, rounds=3, budget_seconds=1.0)
    assert [(row.implementation, row.batch, row.context_tokens, row.peak_bytes) for row in rows] == [
        (name, 2, 32, 105) for name in ("diff auto", "twin sdpa", "twin auto")
    ]
    # Two steps before the clock, a warm-up and three rounds, of three models.
    assert asked == [("sdpa", "bf16", "cuda")] * 18
    failing.add("sdpa")
    rows = time_training("toy", "bf16", device="cuda", rounds=3, budget_seconds=1.0)
    assert all(isinstance(row, TrainingSkip) for row in rows)
    assert {row.implementation: row.reason for row in rows}["twin sdpa"] == "OutOfMemoryError: no room"


def test_memory_that_fails_is_left_out(gpu_backends, monkeypatch):
    def weigh(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(steps_module, "peak_attention_bytes", weigh)
    rows = [row for step in steps_of("memory", Settings(device="cuda")) for row in step.measure()]
    assert len(rows) == 21
    assert {row.reason for row in rows if row.implementation == "torch sdpa"} == {"memory: OutOfMemoryError: no room"}


def test_tables_of_a_gpu(tmp_path, capsys):
    """By hand: time ratios, their inverses, rates with the time over the roofline, means; memory beside training."""

    def row(name, length, ratio):
        where = shape("backward", length, heads=8, head_dim=128, batch=16384 // length)
        times = {"median_seconds": ratio / 1000, "low_seconds": 0.001, "high_seconds": 0.002, "rounds": 3}
        ratios = {"ratio_to_torch_sdpa": ratio, "ratio_to_softmax_kernel": ratio / 0.5}
        found = attention_module.rates(where, name, ratio / 1000, Peak(1e15, 1e13) if length == 2048 else None)
        return AttentionTiming(**vars(where), **times, **ratios, **found, implementation=name)

    rows = [row(name, n, ratio) for n in (2048, 4096) for name, ratio in (("torch sdpa", 1.0), ("softmax triton", 0.5))]
    rows += [row("diff triton deterministic", 2048, 0.5), row("diff triton deterministic", 4096, 2.0)]
    rows += [row("diff triton", 2048, 0.8), row("diff flash", 4096, 4.0)]
    times = {
        "median_seconds": 0.1,
        "low_seconds": 0.1,
        "high_seconds": 0.1,
        "rounds": 3,
        "dtype": "bf16",
        "model": "125M",
    }
    for name, ratio, gigabytes in (("diff auto", 1.04, 26), ("twin sdpa", 1.0, 25)):
        rows += [
            TrainingTiming(**times, parameters=9, implementation=name, ratio_to_twin=ratio, peak_bytes=gigabytes * 2**30,
                           batch=16384 // n, context_tokens=n)
            for n in (2048, 4096)
        ]  # fmt: skip
    skip = {"model": "125M", "dtype": "bf16", "batch": 4, "context_tokens": 4096}
    rows.append(TrainingSkip(**skip, implementation="twin auto", reason="no such kernel"))
    bench = gpu_bench(rows)
    assert read_result(write_result(bench, tmp_path / "results.json"), Bench) == bench
    times, work, training = bench_tables(bench)
    assert [table.name for table in (times, work)] == ["times-backward-bf16-128", "work-backward-bf16-128"]
    assert times.title == "Time, backward, bf16, h = 8, d = 128"
    assert times.header()[:4] == ["implementation", "8x2048: time", "8x2048: token rate", "4x4096: time"]
    assert times.folded() == [
        ["torch sdpa, ms", "1.00", "1.00", ""],
        ["diff triton", "0.80 (1.25)", "-", "0.80* (1.25)"],
        ["diff triton deterministic", "0.50 (2.00)", "2.00 (0.50)", "1.00 (1.00)"],
        ["diff flash", "-", "4.00 (0.25)", "4.00* (0.25)"],
        ["softmax triton", "0.50 (2.00)", "0.50 (2.00)", "0.50 (2.00)"],
        ["diff triton over softmax triton", "1.60 (0.62)", "-", "1.60* (0.62)"],
    ]
    assert work.header()[:3] == ["implementation", "8x2048: TFLOP/s", "8x2048: over the roofline"]
    # 10 units of n n d for 8 x 8 heads in 1 ms are 344 TFLOP/s; at 1e15 FLOP/s they need 0.344 ms.
    assert work.rows[0] == ["torch sdpa", "344", "2.9", "687", "", "1.00x"]
    # At d = 128 a split backward computes dV in its own launch: 16 products where one kernel needs 10.
    assert {row[0]: row[-1] for row in work.rows[1:4]} == {
        "diff triton": "-", "diff triton deterministic": "1.60x", "diff flash": "-"
    }  # fmt: skip
    assert training.header() == ["model", "twin sdpa, ms", "diff auto", "twin sdpa, GiB", "diff auto, memory"]
    assert training.rows[0] == ["125M, bf16, 8 x 2048", "100.00", "1.04", "25.00", "1.04"]
    assert draw_attention(bench).svg == draw_attention(bench).svg
    print_bench(bench, Console(width=120))
    text = capsys.readouterr().out
    assert "Left out: twin auto in the training step of 125M, bf16, 4 x 4,096 tokens: no such kernel" in text
    assert "tokens a second over those of torch sdpa" in " ".join(text.split())


def test_results_of_earlier_releases_open(tmp_path):
    """The roofline's two fields had other names."""
    timing = {**vars(shape()), "implementation": "torch sdpa", "median_seconds": 1.0, "low_seconds": 1.0, "rounds": 3}
    ratios = {"high_seconds": 1.0, "ratio_to_torch_sdpa": 1.0, "ratio_to_softmax_kernel": None}
    bench = gpu_bench([AttentionTiming(**timing, **ratios, time_over_roofline=1.5, work_over_least=1.4)])
    path = write_result(bench, tmp_path / "results.json")
    text = (
        path.read_text().replace("time_over_roofline", "time_over_floor").replace("work_over_least", "work_over_floor")
    )
    assert "floor" in text
    document = json.loads(text)
    del document["sha256"]  # earlier releases wrote none
    path.write_text(json.dumps(document))
    assert read_result(path, Bench) == bench


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "all", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device here; use --device cpu" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_run_on_a_gpu(tmp_path):
    """Every part of the command; PyTorch's flash kernel is the base, and nothing is timed without it."""
    sizes = ("--lengths", "[256,512]", "--head_dims", "[64]", "--repeats", "3", "--seconds", "1")
    with pytest.MonkeyPatch.context() as patch:
        small = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        changed = {"decode_lengths_tokens": (512,), "memory": ((512,), ("diff triton", "torch sdpa")), "models": {"toy": small},
                   "training_tokens": 1024, "training_contexts_tokens": (256, 512)}  # fmt: skip
        patch.setitem(DEFAULTS, "cuda", dataclasses.replace(DEFAULTS["cuda"], **changed))
        assert main(["bench", "all", "--device", "cuda", *sizes, "--out", str(tmp_path)]) == 0
    result = read_result(tmp_path / "results.json", Bench)
    modes = {timing.mode for timing in result.attention if timing.implementation == "torch sdpa"}
    assert modes == {"forward", "backward", "forward+backward", "decode"}
    for timing in result.attention:
        assert 0 < timing.low_seconds <= timing.median_seconds <= timing.high_seconds < 10
        assert timing.teraflops_per_second > 0
    assert {"diff sdpa", "DiffLlama sdpa"} <= {timing.implementation for timing in result.attention}
    assert any(point.implementation == "torch sdpa" for point in result.memory)
    assert {timing.implementation for timing in result.training} >= {"diff auto", "twin sdpa"}
    assert all(timing.peak_bytes > 0 for timing in result.training)
    assert (tmp_path / "attention.svg").exists()
