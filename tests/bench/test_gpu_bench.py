"""The benchmark of a GPU without one: its plan, its clock, its tables; and one small run where there is a GPU."""

import dataclasses
import itertools
import statistics
import warnings

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend

from difftransformer.bench import Settings, plan, sort_rows, time_attention, time_interleaved, time_training
from difftransformer.bench import attention as attention_module
from difftransformer.bench import steps as steps_module
from difftransformer.bench import timing as timing_module
from difftransformer.bench import training as training_module
from difftransformer.bench.defaults import DEFAULTS, GPU_CALL_TOKENS, GPU_HIDDEN_SIZE
from difftransformer.bench.floor import Peak, peak_of
from difftransformer.bench.timing import Prepared
from difftransformer.bench.trial import LONGEST_REASON, Failure, attempt
from difftransformer.bench.work import DETERMINISTIC, attention_work, deterministically, draw, pinned, training_work
from difftransformer.cli.main import main
from difftransformer.ops import BACKENDS
from difftransformer.report.bench import bench_tables, print_bench
from difftransformer.report.bench_figures import draw_attention
from difftransformer.results import (
    AttentionShape,
    AttentionSkip,
    AttentionTiming,
    Bench,
    Environment,
    Timing,
    TrainingSkip,
    TrainingTiming,
    read_result,
    write_result,
)

H200 = "NVIDIA H200"
# Times over torch sdpa's that are made up.
MADE_UP = {
    "torch sdpa": 1.0, "torch cudnn": 0.7, "softmax triton": 1.05, "diff triton": 1.2, "diff triton deterministic": 1.4,
    "normed triton": 1.25, "diff flash": 2.0, "diff flex": 1.7, "diff chunked": 30.0, "diff sdpa": 2.2,
    "DiffLlama sdpa": 2.5,
}  # fmt: skip


def shape(mode="forward", length_tokens=16, heads=2, head_dim=8, dtype="bf16", batch=3):
    return AttentionShape(
        dtype=dtype, mode=mode, length_tokens=length_tokens, heads=heads, head_dim=head_dim, batch=batch
    )


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that takes made-up times and runs nothing; every backend but the CPU's takes part."""
    for name in ("triton", "flash", "flex"):
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(BACKENDS["chunked"], name=name))
    monkeypatch.setattr(attention_module, "draw", lambda *_: "data")
    monkeypatch.setattr(attention_module, "attention_work", lambda name, *_: lambda: None)
    monkeypatch.setattr(attention_module, "wait_for", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H200)
    draws = itertools.cycle([0.97, 1.0, 1.04])

    def times(work, *, device, **_):
        assert device == "cuda"
        return {
            name: Timing(median_seconds=ratio * 1e-3, low_seconds=0.98 * ratio * 1e-3, high_seconds=1.05 * ratio * 1e-3,
                         rounds=30)
            for name in work
            for ratio in [MADE_UP.get(name, 4.0) * (next(draws) if name != "torch sdpa" else 1.0)]
        }  # fmt: skip

    monkeypatch.setattr(attention_module, "time_interleaved", times)


def gpu_bench(rows):
    where = Environment(**dict.fromkeys(("difftransformer", "python", "torch", "transformers", "platform"), "x"),
                        processor="x", device=H200, threads=1)  # fmt: skip
    return Bench(command="", created="", environment=where, foreign_cpu_share=None, **sort_rows(rows, by_width=True))


def test_the_plan_for_a_gpu():
    """16,384 tokens a call and heads of 2,048 together; three passes; decoding to 131,072 keys; two models at two lengths."""
    steps = plan("all", Settings(device="cuda"))
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
    assert [step.label for step in plan("train", Settings())] == [step.label for step in plan("training", Settings())]
    size = DEFAULTS["cuda"].size
    assert all(size(n, 64).batch * n == GPU_CALL_TOKENS for n in (2048, 4096, 8192, 16384))
    assert all(size(2048, d).heads * 2 * d == GPU_HIDDEN_SIZE for d in (32, 64, 128, 256))


def test_who_takes_part_on_a_gpu(gpu):
    """The deterministic backward only where there is one; PyTorch's two kernels; what is slow or large is left out."""
    rows = time_attention(shape(length_tokens=32768), device="cuda", rounds=3, budget_seconds=1.0)
    timed = {row.implementation for row in rows if isinstance(row, AttentionTiming)}
    assert timed == MADE_UP.keys() - {"diff triton deterministic", "diff chunked"}
    reasons = {row.implementation: row.reason for row in rows if isinstance(row, AttentionSkip)}
    assert "many times the others' time: above 16,384 tokens only where --backends names it" in reasons["diff chunked"]
    assert "O(n^2) memory" in reasons["diff reference"]
    assert "budget" in reasons["DiffLlama eager"]
    assert "diff cpu" in reasons
    rows = time_attention(
        shape("backward", 32768), device="cuda", backends=["chunked", "triton"], rounds=3, budget_seconds=1.0
    )
    timed = {row.implementation for row in rows if isinstance(row, AttentionTiming)}
    assert {"diff triton", "diff triton deterministic", "diff chunked"} < timed
    rows = time_attention(shape("decode", 65536), device="cuda", rounds=3, budget_seconds=1.0)
    timed = {row.implementation for row in rows if isinstance(row, AttentionTiming)}
    assert not any("deterministic" in name or "DiffLlama" in name or "normed" in name for name in timed)


@pytest.mark.parametrize("mode", ["forward", "backward", "decode"])
def test_the_whole_way_on_the_wrong_device(mode, monkeypatch):
    """What a GPU would run, with tensors on the CPU and its clock: real calls, a kernel that is not there left out."""
    monkeypatch.setattr(attention_module, "draw", lambda shape, _: draw(shape, "cpu"))
    monkeypatch.setattr(attention_module, "wait_for", lambda _: None)
    monkeypatch.setattr(timing_module, "_device_clock", lambda _: timing_module._host_clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H200)
    if "triton" in BACKENDS:
        monkeypatch.delitem(BACKENDS, "triton")
    rows = time_attention(shape(mode), device="cuda", backends=["chunked", "sdpa"], rounds=3, budget_seconds=0.0)
    timed = {row.implementation: row for row in rows if isinstance(row, AttentionTiming)}
    peers = set() if mode == "decode" else {"DiffLlama sdpa", "DiffLlama eager"}
    assert timed.keys() == {"torch sdpa", "torch cudnn", "diff chunked", "diff sdpa"} | peers
    assert all(row.teraflops_per_second > 0 and row.time_over_floor > 0 for row in timed.values())
    reasons = {row.implementation: row.reason for row in rows if isinstance(row, AttentionSkip)}
    assert reasons["softmax triton"] == "there is no such backend here"


def test_rates_by_hand(gpu, monkeypatch):
    """2 ms for 2 rows of 1,024 tokens, 4 heads, d = 8: 4 units of n n d forward; the fused floor is 6 units."""
    monkeypatch.setattr(
        attention_module,
        "time_interleaved",
        lambda work, **_: {
            name: Timing(median_seconds=2e-3, low_seconds=1e-3, high_seconds=3e-3, rounds=3) for name in work
        },
    )
    monkeypatch.setattr(attention_module, "peak_of", lambda name, dtype: Peak(1e12, 1e12))
    work = shape(length_tokens=1024, heads=4, batch=2)
    rows = time_attention(work, device="cuda", peers=False, rounds=3, budget_seconds=1.0)
    found = {row.implementation: row for row in rows if isinstance(row, AttentionTiming)}
    flops = 4 * (1024 * 1024 * 8) * 4 * 2
    for name, floor in (("torch sdpa", 1.0), ("torch cudnn", 1.0), ("diff triton", 1.5), ("diff sdpa", 1.5)):
        assert found[name].teraflops_per_second == pytest.approx(flops / 2e-3 / 1e12)
        assert found[name].time_over_floor == pytest.approx(2e-3 / (floor * flops / 1e12))
    assert found["diff triton"].work_over_floor == 1
    assert found["diff flex"].work_over_floor == 1
    assert found["diff sdpa"].work_over_floor == pytest.approx(8 / 6)
    assert found["diff flash"].work_over_floor is None
    moved = 4 * 2 * 4 * 1024 * 16 * 2
    assert found["diff triton"].terabytes_per_second == pytest.approx(moved / 2e-3 / 1e12)


def test_peaks_are_of_known_devices():
    assert peak_of(H200, "bf16") == peak_of(H200, "fp16") == Peak(989e12, 4.8e12)
    assert peak_of(H200, "fp32") is None
    assert peak_of("a device of tomorrow", "bf16") is None


def test_what_fails_on_a_gpu_is_left_out(gpu, monkeypatch):
    """One implementation's error is its reason; without the base there are no ratios, and every row says so."""
    failing = {"torch cudnn", "diff flex"}

    def work(name, *_):
        def call():
            if name in failing:
                raise torch.OutOfMemoryError(f"no room for {name}\nand so on")

        return call

    monkeypatch.setattr(attention_module, "attention_work", work)
    rows = time_attention(shape(), device="cuda", peers=False, rounds=3, budget_seconds=1.0)
    reasons = {row.implementation: row.reason for row in rows if isinstance(row, AttentionSkip)}
    assert reasons["torch cudnn"] == "OutOfMemoryError: no room for torch cudnn"
    assert reasons["diff flex"] == "OutOfMemoryError: no room for diff flex"
    assert {"torch sdpa", "diff triton", "softmax triton"} <= {
        row.implementation for row in rows if isinstance(row, AttentionTiming)
    }
    failing.add("torch sdpa")
    rows = time_attention(shape(), device="cuda", peers=False, rounds=3, budget_seconds=1.0)
    assert all(isinstance(row, AttentionSkip) for row in rows)
    reasons = {row.implementation: row.reason for row in rows}
    assert reasons["torch sdpa"] == "OutOfMemoryError: no room for torch sdpa"
    assert "torch sdpa, which ratios are to, did not run (OutOfMemoryError" in reasons["diff triton"]

    def no_room(*_):
        raise torch.OutOfMemoryError("no room for the inputs")

    monkeypatch.setattr(attention_module, "draw", no_room)
    rows = time_attention(shape(), device="cuda", peers=False, rounds=3, budget_seconds=1.0)
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


def test_training_on_a_gpu_has_peaks(small_models, monkeypatch):
    """The step is pinned and weighed against what was there before its model; rows make up the tokens of a step."""
    asked = []
    monkeypatch.setattr(training_module.DiffTransformerForCausalLM, "to", lambda self, _: self)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(training_module, "device_peak_bytes", lambda step, before: (step(), 100 + before)[1])
    monkeypatch.setattr(training_module, "pinned", lambda *words: asked.append(words) or deterministically())
    monkeypatch.setattr(
        training_module,
        "time_interleaved",
        lambda steps, **_: {
            name: Timing(median_seconds=2.0 + index, low_seconds=1.0, high_seconds=1.0, rounds=3)
            for index, name in enumerate(steps)
        },
    )
    rows = time_training("toy", "bf16", device="cuda", context_tokens=32, rounds=3, budget_seconds=1.0)
    assert [(row.implementation, row.batch, row.context_tokens, row.peak_bytes) for row in rows] == [
        (name, 2, 32, 105) for name in ("diff auto", "twin sdpa", "twin auto")
    ]
    assert asked == [("sdpa", "bf16", "cuda")] * 6


def test_a_training_step_that_fails_is_left_out(small_models, monkeypatch):
    failing = {"twin auto"}

    def candidate(name, *_):
        if name in failing:
            raise torch.OutOfMemoryError("no room")
        return training_module._Candidate(print, 7, 1)

    monkeypatch.setattr(training_module, "_candidate", candidate)
    monkeypatch.setattr(
        training_module,
        "time_interleaved",
        lambda steps, **_: {
            name: Timing(median_seconds=2.0, low_seconds=1.0, high_seconds=1.0, rounds=3) for name in steps
        },
    )
    rows = time_training("toy", "bf16", device="cuda", rounds=3, budget_seconds=1.0)
    assert [(type(row), row.implementation) for row in rows] == [
        (TrainingTiming, "diff auto"), (TrainingTiming, "twin sdpa"), (TrainingSkip, "twin auto")
    ]  # fmt: skip
    assert rows[-1].reason == "OutOfMemoryError: no room"
    failing.add("twin sdpa")
    rows = time_training("toy", "bf16", device="cuda", rounds=3, budget_seconds=1.0)
    assert all(isinstance(row, TrainingSkip) for row in rows)
    assert (
        "twin sdpa, which ratios are to, did not run" in {row.implementation: row.reason for row in rows}["diff auto"]
    )


def test_memory_that_fails_is_left_out(gpu, monkeypatch):
    def weigh(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(steps_module, "peak_attention_bytes", weigh)
    rows = [row for step in plan("memory", Settings(device="cuda")) for row in step.measure()]
    assert len(rows) == 21
    assert {row.reason for row in rows if row.implementation == "torch sdpa"} == {"memory: OutOfMemoryError: no room"}


@pytest.fixture
def made_up(gpu, monkeypatch):
    """A whole run of made-up times."""
    monkeypatch.setattr(
        steps_module, "peak_attention_bytes", lambda name, shape, **_: 2**20 * shape.length_tokens // 64
    )
    rows = [
        row
        for part in ("attention", "decode", "memory")
        for step in plan(part, Settings(device="cuda"))
        for row in step.measure()
    ]
    times = {"low_seconds": 0.1, "high_seconds": 0.1, "rounds": 30, "dtype": "bf16", "batch": 8, "context_tokens": 2048}
    for index, name in enumerate(("diff auto", "twin sdpa")):
        rows += [
            TrainingTiming(**times | {"batch": 16384 // n, "context_tokens": n}, model="125M", parameters=124_000_000,
                           implementation=name, median_seconds=0.104 - 0.004 * index, ratio_to_twin=1.04 - 0.04 * index,
                           peak_bytes=(103 - 3 * index) * 2**28)
            for n in (2048, 4096)
        ]  # fmt: skip
    skip = {"model": "125M", "dtype": "bf16", "batch": 4, "context_tokens": 4096}
    rows.append(TrainingSkip(**skip, implementation="twin auto", reason="no such kernel"))
    return gpu_bench(rows)


def test_tables_of_a_gpu(made_up, tmp_path, capsys):
    """Time ratios, their inverses, rates with the time over the floor; means for each width; memory beside training."""
    assert read_result(write_result(made_up, tmp_path / "results.json"), Bench) == made_up
    tables = {table.name: table for table in bench_tables(made_up)}
    modes = ("forward", "backward", "forward+backward", "decode")
    assert list(tables) == [
        *(f"{kind}-{mode}-bf16-{d}" for mode in modes for d in (64, 128) for kind in ("times", "token-rates", "work")),
        "memory", "training",
    ]  # fmt: skip
    times, tokens, work = (tables[f"{kind}-backward-bf16-128"] for kind in ("times", "token-rates", "work"))
    lengths = ["8x2048", "4x4096", "2x8192", "16384", "32768", "65536"]
    assert times.title == "Time, backward, bf16, h = 8, d = 128"
    assert times.header() == tokens.header() == ["implementation", *lengths, "geometric mean"]
    mine = [
        timing.ratio_to_torch_sdpa
        for timing in made_up.attention
        if (timing.mode, timing.implementation, timing.head_dim) == ("backward", "diff triton", 128)
    ]
    mean = statistics.geometric_mean(mine)
    time_rows, token_rows, work_rows = ({row[0]: row[1:] for row in table.rows} for table in (times, tokens, work))
    assert time_rows["torch sdpa, ms"] == ["1.00"] * 6 + [""]
    assert time_rows["diff triton"] == [f"{ratio:.2f}" for ratio in (*mine, mean)]
    assert token_rows["diff triton"] == [f"{1 / ratio:.2f}" for ratio in (*mine, mean)]
    assert time_rows["diff chunked"][4:6] == ["-", "-"]
    assert time_rows["diff chunked"][6].endswith("*")
    assert list(time_rows)[-1] == "diff triton over softmax triton"
    base = next(
        timing
        for timing in made_up.attention
        if (timing.mode, timing.implementation, timing.length_tokens, timing.head_dim)
        == ("backward", "torch sdpa", 2048, 128)
    )
    assert work.header()[:3] == ["implementation", "8x2048: TFLOP/s", "8x2048: over the floor"]
    assert work_rows["torch sdpa"][:2] == [f"{base.teraflops_per_second:.0f}", f"{base.time_over_floor:.1f}"]
    # At d = 128 a split backward launches dV apart: 16 products of units of n^2 d where one kernel needs 10.
    names = ("triton deterministic", "flex", "flash")
    assert [work_rows[f"diff {name}"][-1] for name in names] == ["1.60x", "1.40x", "-"]
    assert tables["work-decode-bf16-64"].title == "TB/s, decode, bf16, h = 16, d = 64"
    assert tables["training"].header() == [
        "model", "twin sdpa, ms", "diff auto", "twin sdpa, GiB", "diff auto, memory"
    ]  # fmt: skip
    assert tables["training"].rows[0] == ["125M, bf16, 8 x 2048", "100.00", "1.04", "25.00", "1.03"]
    assert draw_attention(made_up).svg == draw_attention(made_up).svg
    print_bench(made_up, Console(width=120))
    text = capsys.readouterr().out
    assert "Left out: twin auto in the training step of 125M, bf16, 4 x 4,096 tokens: no such kernel" in text
    assert "Tokens a second over those of torch sdpa" in text


def test_no_floor_where_the_peak_is_unknown(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device of tomorrow")
    (table,) = [
        table
        for table in bench_tables(gpu_bench(time_attention(shape(), device="cuda", rounds=3, budget_seconds=1.0)))
        if table.name.startswith("work-")
    ]
    assert table.rows[0][2] == ""
    assert float(table.rows[0][1]) > 0


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
        changed = {"decode_lengths_tokens": (512,), "memory_lengths_tokens": (512,), "models": {"toy": small},
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
