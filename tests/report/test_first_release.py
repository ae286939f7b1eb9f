"""Results of release 0.1.0: converted without a figure lost; other readers name the command that converts them."""

import json
from pathlib import Path

import pytest

from difftransformer.errors import ResultsError
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.first_release import read_study
from difftransformer_lab.results import Comparison, Upcycling, read_result

ENVIRONMENT = {
    "difftransformer": "0.1.0", "python": "3", "torch": "2", "transformers": "5", "platform": "p", "processor": "c",
    "device": "cpu", "threads": 2,
}  # fmt: skip
EVALUATION = {
    "nll": {"windows": 2, "position_buckets": 2},
    "needle": {"digits": 2, "documents": 4, "needles": [[1, 1], [2, 1]], "depths": [0.0, 1.0], "seed": 0},
    "allocation": {"digits": 2, "documents": 4, "needles": 2, "depths": [0.5], "seed": 0},
}
RIGHT = (1, 2, 3, 4, 0, 1, 2, 3)


def evaluations(loss):
    places = [(n, depth, cities) for n in (1, 2) for depth in (0.0, 1.0) for cities in ("seen", "unseen")]
    return {
        "nll": {
            "nll_nats_per_token": loss, "bits_per_byte": loss / 2, "tokens": 8, "bytes": 16, "context_tokens": 4,
            "by_position": [
                {"start_tokens": 0, "end_tokens": 2, "nll_nats_per_token": loss + 1, "tokens": 4},
                {"start_tokens": 2, "end_tokens": 4, "nll_nats_per_token": loss - 1, "tokens": 4},
            ],
            "documents": [
                {"nll_nats": 3 * loss - 1, "tokens": 4, "bytes": 7}, {"nll_nats": 5 * loss + 1, "tokens": 4, "bytes": 9},
            ],
        },
        "needle": {
            "digits": 2, "chance": 0.01,
            "cells": [
                {"length_tokens": 64, "depth": depth, "needles": n, "asked": 1, "cities": cities, "correct": c, "trials": 4}
                for (n, depth, cities), c in zip(places, RIGHT, strict=True)
            ],
        },
        "allocation": {
            "length_tokens": 64, "needles": 2, "documents": 4,
            "shares": [
                {"depth": 0.5, "form": form, "segment": segment, "share": 0.2, "standard_error": 0.01}
                for form in ("signed", "absolute", "positive")
                for segment in ("first", "before", "answer", "after", "query")
            ],
        },
    }  # fmt: skip


def document(kind):
    curve = {"steps": [1, 2], "values": [3.0, 2.0]}
    models = [
        {"model": name, "label": name, "attention_type": name, "parameters": 10, "train_flops_per_token": 1,
         "kv_bytes_per_token": 1}
        for name in ("diff", "softmax")
    ]  # fmt: skip
    runs = [
        {"model": name, "seed": 0, "run": f"runs/{name}", "train_loss_nats": curve, "validation_loss_nats": curve,
         "lambda_steps": [], "lambda_values": [], "train_tokens": 8, "train_seconds": 1.0, **evaluations(loss)}
        for name, loss in (("diff", 2.0), ("softmax", 2.5))
    ]  # fmt: skip
    result = {
        "name": "old", "command": "difftransformer compare old.yaml", "created": "then", "environment": ENVIRONMENT,
        "recipe": {"evaluation": EVALUATION}, "models": models, "runs": runs,
    }  # fmt: skip
    if kind == "comparison":
        result |= {"seeds": [0], "baselines": [], "costs": [], "metrics": []}
    else:
        drift = {"tokens": 9, "largest_logit_difference": 0.0, "largest_logit": 1.0, "mean_kl_nats": 0.0,
                 "greedy_tokens": 2, "greedy_same_tokens": 2}  # fmt: skip
        before = {"checkpoint": "softmax", "command": "", "created": "", "environment": ENVIRONMENT, **evaluations(3.0)}
        result |= {
            "source": "llama", "added_parameters": {"diff": 1, "softmax": 0},
            "drift": {"diff": drift, "softmax": drift}, "before": before | {"needle": None}, "differences": {},
        }  # fmt: skip
    return {"kind": kind, "version": 1, "result": result}


@pytest.fixture(params=["comparison", "upcycling"])
def old(request, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document(request.param)))
    return path


def test_every_figure_is_kept(old):
    study, is_old = read_study(old)
    assert is_old
    run = study.runs[0].evaluations
    figures = {(row.name, *row.at.values()): row for row in run["perplexity"].measurements}
    assert figures["nll",].value == pytest.approx(2.0)
    assert figures["bits per byte",].value == pytest.approx(16 / 0.6931471805599453 / 16)
    assert (figures["nll by position", 0, 2].value, figures["nll by position", 2, 4].value) == (3.0, 1.0)
    found = [
        round(row.value * row.n) for n in (1, 2) for depth in (0.0, 1.0) for cities in ("seen", "unseen")
        for row in run["needle"].measurements
        if row.at == {"cities": cities, "needles": n, "asked": 1, "length_tokens": 64, "depth": depth}
    ]  # fmt: skip
    assert tuple(found) == RIGHT
    seen = next(row for row in run["needle"].measurements if row.at == {"cities": "seen"})
    assert (round(seen.value * seen.n), seen.n) == (6, 16)
    shares = [row for row in run["allocation"].measurements if row.name == "attention share"]
    assert [(row.value, row.standard_error) for row in shares] == [(0.2, 0.01)] * 15
    loss = next(row for row in study.metrics if row.unit == "nats/token")
    assert loss.differences["diff"].mean == pytest.approx(-0.5)
    assert loss.differences["diff"].interval_method == "studentised over items"
    if isinstance(study, Upcycling):
        assert list(study.before) == ["perplexity", "allocation"]
        assert study.seeds == [0]


def test_report_draws_and_converts_it(old, tmp_path, capsys):
    assert main(["report", str(old), "--out", str(tmp_path / "page")]) == 0
    assert f"Results, converted: {tmp_path / 'page' / 'results.json'}" in capsys.readouterr().out
    kind = json.loads(old.read_text())["kind"]
    again = read_result(tmp_path / "page" / "results.json", Comparison if kind == "comparison" else Upcycling)
    assert again == read_study(old)[0]
    assert read_study(tmp_path / "page" / "results.json") == (again, False)
    assert "validation loss" in (tmp_path / "page" / "index.html").read_text()


def test_other_readers_name_the_command(old):
    kind = json.loads(old.read_text())["kind"]
    with pytest.raises(
        ResultsError, match=r"version 1, this release reads version 2; convert it with difftransformer report"
    ):
        read_result(old, Comparison if kind == "comparison" else Upcycling)


def test_damage_is_named(tmp_path):
    broken = document("comparison")
    del broken["result"]["runs"][0]["nll"]["documents"]
    (tmp_path / "old.json").write_text(json.dumps(broken))
    with pytest.raises(
        ResultsError, match=r"old\.json: a damaged result of release 0\.1\.0 \(KeyError\('documents'\)\)"
    ):
        read_study(tmp_path / "old.json")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json")), ids=str)
def test_committed_studies_are_of_this_release(path):
    kind = json.loads(path.read_text())["kind"]
    if kind in ("comparison", "upcycling"):
        assert not read_study(path)[1]
