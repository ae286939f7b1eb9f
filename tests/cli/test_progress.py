"""Lines in place of a progress bar, at each tenth of the work and after a while in any case; and lines of the log."""

import logging
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from difftransformer.progress import part, report, shown_by, titled
from difftransformer.train.metrics import StepMetrics
from difftransformer_lab.cli import progress
from difftransformer_lab.cli.console import log_shown
from difftransformer_lab.studies import Job


def jobs_of(count):
    return [
        Job(label=f"run {i}", folder=Path(f"{i}"), shards=[], steps=100, flops=1.0, threads=1) for i in range(count)
    ]


def lines_of(text):
    return [line for line in text.splitlines() if line.startswith("study small: ")]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(99, "99 s"), (100, "2 min"), (5999, "100 min"), (6000, "1.7 h"), (359_000, "99.7 h"), (1e6, "12 days")],
)
def test_times_in_words(seconds, words):
    assert progress.in_words(seconds) == words


def test_a_slow_evaluation_prints_a_line_at_least_every_half_minute(clock, capfd):
    with progress.evaluation_progress(), titled("needle"):
        for second in range(0, 121, 5):
            clock[0] = float(second)
            report(second // 50, 1000)
        report(100, 1000)
        report(150, 1000)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("needle: ") and "after" in line]
    assert lines == [
        "needle: 0 % after 35 s",
        "needle: 0 % after 70 s, about 19.4 h left",
        "needle: 0 % after 2 min, about 14.6 h left",
        "needle: 10 % after 2 min, about 18 min left",
    ]


OF_THREE = [
    "study small: 1 of 3 runs, about 2 min left",
    "study small: 2 of 3 runs, about 60 s left",
    "study small: 3 of 3 runs",
]


def test_a_study_prints_a_line_for_each_run_with_the_time_left(clock, capfd):
    jobs = jobs_of(3)
    with progress.Bars() as bars:
        watch = progress.watch_study(bars, "study small")
        watch(jobs)
        for i, job in enumerate(jobs):
            clock[0] += 60
            job.step, job.done = 100, True
            watch(jobs)
            clock[0] += 0.5
            if i < 2:
                jobs[i + 1].step = 1
                watch(jobs)
    assert lines_of(capfd.readouterr().out) == OF_THREE


def test_a_study_counts_its_runs_anew_after_learning_rates_were_chosen(clock, monkeypatch):
    shown = Console(width=120, file=StringIO())
    monkeypatch.setattr(progress, "console", shown)
    with progress.Bars() as bars:
        watch = progress.watch_study(bars, "study small")
        for count in (3, 2):
            jobs = jobs_of(count)
            watch(jobs)
            for job in jobs:
                clock[0] += 60
                job.step, job.done = 100, True
                watch(jobs)
        assert [bar.visible for bar in bars.tasks] == [False, True]
    of_two = ["study small: 1 of 2 runs, about 60 s left", "study small: 2 of 2 runs"]
    assert lines_of(shown.file.getvalue()) == [*OF_THREE, *of_two]


def test_the_time_left_of_a_study_weighs_runs_by_their_flops(clock, capfd):
    jobs = jobs_of(3)
    for job, flops in zip(jobs, (60.0, 60.0, 600.0), strict=True):
        job.flops = flops
    with progress.Bars() as bars:
        watch = progress.watch_study(bars, "study small")
        watch(jobs)
        for job in jobs[:2]:
            clock[0] += 60
            job.step, job.done = 100, True
            watch(jobs)
        clock[0] += 300
        jobs[2].step = 50
        watch(jobs)
    assert lines_of(capfd.readouterr().out) == [
        "study small: 1 of 3 runs, about 11 min left",
        "study small: 2 of 3 runs, about 10 min left",
        "study small: 2 of 3 runs, about 5 min left",
    ]


def test_a_run_that_goes_on_is_judged_by_its_own_steps(clock, capfd):
    ones = dict.fromkeys(("gradient_norm", "learning_rate", "tokens", "seconds"), 1)
    metrics = StepMetrics(step=0, loss_nats=2.0, tokens_per_second=1000.0, lambdas=[], **ones)
    with progress.Bars() as bars:
        bar = progress.step_bar(bars, "run", 1000)
        for step in (500, 600):
            bar.on_metrics(None, replace(metrics, step=step))
            clock[0] += 10
    assert "run: step 600 of 1000, loss 2.000, 1,000 tokens/s, about 40 s left" in capfd.readouterr().out.splitlines()


def test_reports_have_the_titles_around_them_and_go_to_the_innermost_listener():
    outer, inner = [], []
    report(1, 2)
    with shown_by(lambda *told: outer.append(told)), titled("needle"):
        report(1, 2)
        with titled("judging"):
            report(3, 4, "late")
        with shown_by(lambda *told: inner.append(told)):
            report(5, 6)
        with pytest.raises(ValueError, match="stop"), titled("lost"):
            raise ValueError("stop")
        report(7, 8)
    report(9, 9)
    assert outer == [(1, 2, "needle"), (3, 4, "needle, judging, late"), (7, 8, "needle")]
    assert inner == [(5, 6, "")]


def test_log_lines_of_the_laboratory_are_shown_once_and_only_while_a_command_runs(capfd):
    lines = logging.getLogger("difftransformer_lab.studies.study")
    for _ in range(2):
        with log_shown():
            lines.info("training %d runs", 3)
            logging.getLogger("difftransformer").info("backend cpu")
    lines.info("afterwards")
    assert capfd.readouterr().out.splitlines() == ["training 3 runs"] * 2


def test_parts_of_the_work_are_reported_as_one():
    told = []
    with shown_by(lambda *report: told.append(report)), titled("checking"):
        for index in range(2):
            with part(index, 2):
                report(1, 2, "a")
                report(2, 2)
    assert told == [(1, 4, "checking, a"), (2, 4, "checking"), (3, 4, "checking, a"), (4, 4, "checking")]
    with part(0, 1):
        report(1, 2)  # without a listener
