"""The live part of `demo`: its task and models are those of the study `recall`, and it says what was found."""

import html
import json
import re
import subprocess
import sys
import time
from textwrap import indent

import numpy as np
import pytest
import torch
from torch import nn

from difftransformer.data.synthetic import NoisyRecall
from difftransformer.errors import DiffTransformerError
from difftransformer.ops import build
from difftransformer_lab.cli.main import main
from difftransformer_lab.demo import live, page, recall, result
from difftransformer_lab.studies.design import Design, load_study
from tests.cli.test_interruption import is_alive

SHARES = {"diff": [0.5, 0.95, 1.0], "twin-norm": [0.3, 0.4, 0.92], "twin": [0.2, 0.3, 0.34]}
CURVES = {arm: [dict(zip((100, 200, 300), shares, strict=True))] for arm, shares in SHARES.items()}


@pytest.fixture(scope="module")
def recipes():
    design = Design(load_study("recall"), "laptop")
    return {arm: design.run(arm, {"noise": "0.6"}, 0).recipe for arm in recall.ARMS}


def test_task_models_and_training_are_those_of_the_study(recipes):
    for name, recipe in recipes.items():
        model, training = recall.build(recall.ARMS[name], 0), recipe.training
        assert recall.TASK.__dict__ == NoisyRecall(**recipe.data.options).__dict__
        assert model.num_parameters() == pytest.approx(84_500, rel=0.01)
        for key, value in recipe.model.items():
            assert getattr(model.config, key) == value, key
        assert training.batch_tokens == recall.BATCH_TOKENS
        assert recall.rate_factor.keywords == {"peak": 1.0, "steps": training.steps, "schedule": training.schedule}
        optimizer = training.optimizer
        assert (optimizer.betas, optimizer.weight_decay, optimizer.clip_norm) == ((0.9, 0.98), 0.01, 1.0)
        assert recipe.data.source == "synthetic:noisy-recall"


class _Says(nn.Module):
    """Gives one token the largest logit everywhere."""

    def __init__(self, token):
        super().__init__()
        self.token = token

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, recall.TASK.vocab_size)
        logits[..., self.token] = 1
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("arm", recall.ARMS)
def test_no_kernel_is_compiled(arm, monkeypatch):
    monkeypatch.setattr(build, "load", lambda: pytest.fail("kernels are compiled or loaded"))
    model = recall.build(recall.ARMS[arm], 0)
    assert [step for step, _ in recall.learn(model, recall.ARMS[arm].rate, 0, 1)] == [1]
    assert recall.read(model, 0).weights.any()


def test_accuracy_counts_the_answers_alone():
    inputs, targets = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[-100, 5, -100, 6], [5, 5, -100, -100]])
    assert recall.accuracy(_Says(5), inputs, targets) == 0.75


def test_what_a_lazy_answer_scores():
    """The most frequent value so far, counted by hand on held-out rows."""
    inputs, targets = recall.held_out(0)
    right = asked = 0
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        counts = dict.fromkeys(range(recall.TASK.vocab_size), 0)
        for token, answer in zip(row, answers, strict=True):
            counts[token] += 8 <= token < 16
            if answer != recall.IGNORED:
                asked += 1
                right += max(counts, key=counts.get) == answer
    assert right / asked == pytest.approx(recall.LAZY, abs=0.02)


def test_the_row_and_the_share_of_its_weights():
    row = recall.read(recall.build(recall.ARMS["diff"], 0), seed=0)
    values = [token for token in row.tokens if 8 <= token < 16]
    assert [row.tokens[i - 1] for i in row.found] == [row.tokens[-1]] * len(row.found)
    assert {row.tokens[i] for i in row.found} == {row.answer}
    assert max(values.count(value) for value in values) > values.count(row.answer)
    last = row.weights[-1].astype(np.float64)
    assert row.share == pytest.approx(last[row.found].sum() / np.abs(last).sum(), rel=1e-5)
    assert not np.triu(row.weights, 1).any()
    assert (row.weights < 0).any()


def test_names_of_tokens():
    assert [page.name(token) for token in (0, 7, 8, 15, 16, 31)] == ["A", "H", "0", "7", "·", "·"]


def test_summaries_and_the_sentence():
    found = result.summaries(CURVES)
    assert result.sentence(found) == "DIFF 100%, Transformer + DIFF's norm 92%, Transformer 34%"
    assert (found["diff"].learned, found["diff"].steps) == (1, 200)
    assert (found["twin"].learned, found["twin"].steps) == (0, None)


def test_what_the_stored_runs_show():
    """The claims of the page and of the last lines."""
    found = result.summaries(result.stored())
    assert {one.seeds for one in found.values()} == {20}
    assert found["diff"].learned == found["twin-norm"].learned == 20
    assert found["twin"].learned == 0
    assert found["diff"].steps < found["twin-norm"].steps
    assert found["twin"].highest < found["diff"].lowest


def test_the_page_says_what_was_found(tmp_path):
    runs = [run_of(arm) for arm in recall.ARMS]
    source = page.write_page(runs, result.summaries(result.stored()), 300, tmp_path, "maps.html").read_text("utf-8")
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", source.partition("<h1>")[2])).split())
    assert (
        "the DIFF model answers 100 %, the Transformer + DIFF's norm answers 92 %, and the Transformer answers 34 %."
        in text
    )
    assert "20 of 20 DIFF models and 0 of 20 Transformers answer 90 % after 300 steps" in text
    assert source.count("<polyline") == source.count('class="frame"') == 3
    assert "http" not in re.sub(r'<a href="https://arxiv.org/[^"]+"', "", source)


def run_of(arm):
    return live.Run(arm, 0, CURVES[arm][0], recall.read(recall.build(recall.ARMS[arm], 0), seed=0))


def test_a_process_that_dies_is_an_error(monkeypatch):
    with live.Runs(("diff",), [0], 25, 1) as runs:
        for process in runs._processes:
            process.kill()
        with pytest.raises(DiffTransformerError, match="ended early"):
            runs.wait(lambda _: None)
    assert not any(process.is_alive() for process in runs._processes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_with_a_parent_that_is_killed():
    code = "from difftransformer_lab.demo.live import Runs\nif __name__ == '__main__':\n" + indent(
        "with Runs(('twin',), [0], 10**6, 1) as runs:\n"
        "    print(runs._processes[0].pid, flush=True)\n    runs.wait(lambda _: None)\n", "    "
    )  # fmt: skip
    quiet = {"stderr": subprocess.DEVNULL}  # the killed process leaves semaphores
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **quiet) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(600):
        if not is_alive(child):
            return
        time.sleep(0.1)
    raise AssertionError("the child still trains a minute after its parent was killed")


@pytest.mark.slow(minutes=1)
def test_the_demo_trains_three_models_and_writes_their_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "50", "--seeds", "2"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"Lisbon 42, Oslo 63 +Oslo +63 +42 ", said)
    assert "seed 1, step 50: DIFF " in said
    shares = json.loads((tmp_path / "reports/demo/results.json").read_text())["shares"]
    assert f"after 50 steps: DIFF {np.mean([one[-1] for one in shares['diff']]):.0%} (" in said
    assert (tmp_path / "reports/demo/maps.html").exists()
    assert "Three models learn noisy recall" in (tmp_path / "reports/demo/index.html").read_text("utf-8")
