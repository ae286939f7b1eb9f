"""Answers that math-verify reads and compares; an oracle solves everything, a wrong model nothing."""

import itertools
import json
import random
import re

import pytest
import tokenizers

from difftransformer.data import Tokenizer, byte_tokenizer
from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.models.stopping import closing_tokens, stop_tokens, text_until
from difftransformer_lab.evals.tasks.math import MathTask, Options
from tests.support.answering import Writer, tiny_model


@pytest.mark.parametrize(("answer", "text", "right"), [
    ("29", "6 * 8 = 48. The answer is \\boxed{29}.", True), ("29", "48 - 19 = 29", True), ("29", "28", False),
    ("so 5 + 5 = 10\n#### 1,200", "\\boxed{1200}", True), ("\\frac{1}{2}", "0.5", True), ("x^2+2x+1", "$(x+1)^2$", True),
    ("Then \\boxed{[0,1)}", "The answer is $[0, 1)$.", True), ("[0,1)", "The answer is $[0, 1]$.", False),
    ("40", "I do not know.", False),
])  # fmt: skip
def test_math_verify_reads_and_compares(answer, text, right, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": answer}))
    model = Writer(lambda prompt: text)
    found = figures(run_task(model, MathTask(Options(sets=[str(path)], shots=0), model)))
    assert found["mean accuracy", None].value == right


def test_files_that_cannot_be(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "Which?", "answer": "perhaps"}))
    with pytest.raises(DataError, match="one/1: no number or formula in 'perhaps'; see eval ask"):
        MathTask(Options(sets=[str(path)]), Writer(str))
    with pytest.raises(DataError, match=r"no such file; name a \.jsonl file with \"question\" and \"answer\""):
        MathTask(Options(sets=[str(tmp_path / "none.jsonl")]), Writer(str))
    path.write_text("\n")
    with pytest.raises(DataError, match="the file is empty; give one JSON object"):
        MathTask(Options(sets=[str(path)]), Writer(str))
    with pytest.raises(ConfigError, match=r"sets=\[\]: name a \.jsonl file"):
        MathTask(Options(), Writer(str))


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = []
    for a, b in itertools.product(range(1, 11), (3, 1000)):
        answer = f"#### {a + b}" if a > 5 else a + b
        rows.append({"question": f"What is {a} + {b}?", "answer": answer, "set": "odd" if a % 2 else "even"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def solve(prompt, off=0):
    a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)\?", prompt)[-1])
    return f" {a} + {b} = {a + b}. The answer is \\boxed{{{a + b + off:,}}}.\n\nProblem: What is 1 + 1? \\boxed{{2}}"


def figures(scores):
    return {(row.name, row.at.get("set")): row for row in scores.measurements}


@pytest.mark.parametrize("shots", [0, 2, 4])
def test_the_oracle_and_the_wrong_model(problems, shots):
    options = Options(sets=[problems], shots=shots)
    # Without worked examples nothing says where a solution ends but the end of text.
    write = solve if shots else lambda prompt: solve(prompt).partition("\n")[0]
    oracle = Writer(write)
    found = figures(run_task(oracle, MathTask(options, oracle)))
    assert (found["accuracy", "odd"].value, found["accuracy", "odd"].n) == (1.0, 10)
    assert (found["mean accuracy", None].value, found["mean accuracy", None].n) == (1.0, 20)
    assert all(prompt.count("Problem: ") == shots + 1 for prompt in oracle.prompts)
    wrong = Writer(lambda prompt: solve(prompt, off=1))
    assert figures(run_task(wrong, MathTask(options, wrong)))["mean accuracy", None].value == 0


def test_an_ending_of_several_tokens():
    tokenizer = byte_tokenizer()
    assert text_until(tokenizer, tokenizer.encode("one\n\ntwo\n\n"), "\n\n") == ("one", 5)
    assert text_until(tokenizer, tokenizer.encode("one\ntwo"), "\n\n") == ("one\ntwo", 7)
    assert stop_tokens(tokenizer) == (256, 257)
    assert stop_tokens(tokenizer, "\n") == (10, 256, 257)


def test_an_ending_in_one_token_with_the_end_of_the_answer(problems):
    """Many tokenizers have a token for a bracket, a full stop and a line end: without it no bracket closes the answer."""
    backend = json.loads(byte_tokenizer().backend.to_str())
    backend["pre_tokenizer"]["use_regex"] = False
    backend["model"]["vocab"] |= {"}.": 256, "}.\u010a": 257}
    backend["model"]["merges"] = [["}", "."], ["}.", "\u010a"]]
    backend["added_tokens"] = [token | {"id": token["id"] + 2} for token in backend["added_tokens"]]
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)))
    assert tokenizer.encode("}.\n") == [257]
    assert stop_tokens(tokenizer, "\n") == (10, 257, 258, 259)
    assert closing_tokens(tokenizer, "\n") == (257,)
    oracle = Writer(solve, tokenizer=tokenizer)
    found = figures(run_task(oracle, MathTask(Options(sets=[problems]), oracle)))
    assert found["mean accuracy", None].value == 1.0


def test_lengths_and_the_cap(problems):
    model = Writer(lambda prompt: " 1" * (3 if "1000" in prompt else 30) + "\nProblem: more")
    found = figures(run_task(model, MathTask(Options(sets=[problems], max_new_tokens=20), model)))
    assert found["solution length", "odd"].value == (6 + 20) / 2
    assert found["cut by the cap", "odd"].value == 0.5


def test_a_guesser_scores_chance(problems, tmp_path):
    """Answers are 0 to 9; a guess is right one time in ten, within three standard errors of 400 problems."""
    draw, path = random.Random(0), tmp_path / "digits.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": i % 10}) + "\n" for i in range(400)))
    model = Writer(lambda prompt: f" {draw.randrange(10)}")
    found = figures(run_task(model, MathTask(Options(sets=[str(path)], shots=0), model)))["accuracy", "digits"]
    assert abs(found.value - 0.1) < 3 * (0.09 / 400) ** 0.5
    assert found.standard_error == pytest.approx((found.value * (1 - found.value) / 400) ** 0.5)


def test_chat_prompts(problems):
    model = Writer(lambda prompt: solve(prompt).partition("\n")[0])
    model.tokenizer.chat_template = "<{{ messages[0]['content'] }}>{% if add_generation_prompt %}!{% endif %}"
    found = figures(run_task(model, MathTask(Options(sets=[problems], prompt="chat", shots=0), model)))
    assert found["mean accuracy", None].value == 1.0
    assert model.prompts[0].startswith("<Solve the problem step by step.")
    assert model.prompts[0].endswith(">!")


def test_a_prompt_longer_than_the_context(problems):
    model = Writer(solve, context_tokens=1200)
    words = r"the longest prompt takes \d+ tokens .* 1024, the model's context has 1200; lower"
    with pytest.raises(DataError, match=words):
        MathTask(Options(sets=[problems]), model)


def test_the_command(problems, tmp_path, capfd):
    out = tmp_path / "out"
    words = ["--sets", f"[{problems}]", "--problems", "2", "--shots", "0", "--max-new-tokens", "4"]
    assert main(["eval", "math", tiny_model(tmp_path / "model"), "--out", str(out), *words]) == 0
    result = json.loads((out / "math.json").read_text())["result"]
    assert {row["at"].get("set") for row in result["measurements"]} == {"odd", "even", None}
    assert len(result["items"]) == 4
    assert (out / "math.svg").read_text().startswith("<?xml")
    assert "mean accuracy" in capfd.readouterr().out
