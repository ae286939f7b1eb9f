"""difftransformer upcycle: one model, or the study of several."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from difftransformer.data import byte_tokenizer
from difftransformer.model import DiffTransformerForCausalLM
from difftransformer_lab.analysis import analyse, read_records
from difftransformer_lab.cli.main import main

KINDS = "softmax, diff, diff_v2, grouped_diff, grouped_diff_v2, dex, gate, diff_gate"


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama with a tokenizer and a chat template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save(tmp_path / "llama")
    (tmp_path / "llama" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return tmp_path / "llama"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"line {i} tells of {i * i} things\n" for i in range(900)))
    return path


def test_one_model(llama, text, tmp_path, capfd):
    out = tmp_path / "made"
    assert main(["upcycle", str(llama), str(out), "--to", "diff", "--text", str(text), "--tokens", "300"]) == 0
    lines = capfd.readouterr().out.splitlines()[:-1]
    model = DiffTransformerForCausalLM.from_pretrained(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    added = 2 * (2 * 24 * 24 + 4 * 8)  # in each of two layers 24 rows of Q2 and of K2, and four vectors
    new = f"{added:,} of them new ({added / (parameters - added):+.1%})"
    assert lines[0] == f"{out}: diff, {parameters:,} parameters, {new}"
    assert lines[-1].startswith(f"On 300 tokens of {text}, in fp32 and eager attention: logits differ by at most ")
    assert float(lines[-1].partition(" at most ")[2].split()[0]) < 1e-6
    assert lines[-1].endswith("64 of 64 greedy tokens are the same in the default attention")
    messages = [{"role": "user", "content": "hello"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(messages, tokenize=False) == "hello"


@pytest.mark.parametrize(("words", "message"), [
    ((), f"--to is missing; choose one of {KINDS}"),
    (("--to", "diffs"), f"--to 'diffs' is unknown; choose one of {KINDS}"),
    (("--to", "diff,dex"), "several are made with --train only"),
    (("--train", "recipes/upcycle.yaml", "--seed", "3"), "--seed is not used with --train; leave it out"),
   (("--to", "diff", "--set", "training.steps=3"), "--set training.steps=3: changes the recipe of --train; give one"),
   (("--to", "diff", "--head_norm", "gain"), "a headwise norm discards the size of each row"),
    (("--to", "diff", "--text", "nowhere.txt"), "no such file or folder"),
    (("--to", "diff", "--tokens", "-5"), "--tokens -5: give at least 2, or 0"),
    (("--to", "diff", "--tokens", "1"), "--tokens 1: give at least 2, or 0"),
])  # fmt: skip
def test_refusals(words, message, llama, tmp_path, fails):
    assert message in fails("upcycle", llama, tmp_path / "made", *words)
    assert not (tmp_path / "made").exists()


def test_a_text_too_short_to_compare_is_refused_before_anything_is_written(llama, tmp_path, fails):
    text, out = tmp_path / "letter.txt", tmp_path / "made"
    text.write_text("x")
    line = fails("upcycle", llama, out, "--to", "diff", "--text", text)
    assert "letter.txt: 1 tokens, too few to compare; give a longer text, or --tokens 0" in line
    assert not out.exists()
    assert main(["upcycle", str(llama), str(out), "--to", "diff", "--text", str(text), "--tokens", "0"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_the_study(llama, text, tmp_path):
    """Toy lengths of the shipped recipe: every model trained on the same batches; run again, nothing is done twice."""
    shorter = {
        "data.source": text, "data.folder": tmp_path / "shards", "training.steps": 3, "training.batch_tokens": 128,
        "training.context_stages": "[[0, 64]]", "training.retrieval": "null", "training.validate_every": 2,
        "training.validation_windows": 2, "evaluation.perplexity.windows": 3, "evaluation.needle": "null",
    }  # fmt: skip
    words = ["upcycle", str(llama), str(tmp_path / "study"), "--to", "diff_v2,dex,softmax+diff_v2"]
    words += ["--train", "recipes/upcycle.yaml"]
    words += [word for key, value in shorter.items() for word in ("--set", f"{key}={value}")]
    assert main(words) == 0
    evidence = read_records(tmp_path / "study" / "results.json")
    index, names = evidence.index, ["diff_v2", "dex", "softmax+diff_v2", "softmax"]
    assert [arm.name for arm in index.arms] == [size.arm for size in index.sizes] == names
    assert index.upcycling.source == "llama"
    parameters = {size.arm: size.parameters for size in index.sizes}
    assert min(parameters["diff_v2"], parameters["dex"]) > parameters["softmax"]
    assert abs(parameters["diff_v2"] - parameters["softmax+diff_v2"]) <= 1.5 * 24 * 2
    assert index.upcycling.drift.keys() == set(names)
    for drift in index.upcycling.drift.values():
        assert drift.largest_logit_difference < 1e-5
        assert drift.greedy_same_tokens == 64
    runs = {arm: evidence.at(arm, ())[0] for arm in names}
    first = [run.curves["train_loss_nats"].values[0] for run in runs.values()]
    assert first == pytest.approx([first[0]] * 4, abs=2e-3)  # the same batch, the same function, in bf16
    assert {figure.task for figure in index.upcycling.before} == {"perplexity"}
    assert all(run.train_tokens == 3 * 128 for run in runs.values())
    ends = {
        arm: next(row.value for row in run.evaluations["perplexity"].measurements if row.name == "nll")
        for arm, run in runs.items()
    }
    differences = {
        row.arm.name: row.difference
        for row in analyse(evidence).rows
        if row.figure.unit == "nats/token" and row.difference
    }
    assert set(differences) == {"diff_v2", "dex", "softmax+diff_v2"}
    page = (tmp_path / "study" / "index.html").read_text()
    for name, difference in differences.items():
        assert difference.mean == pytest.approx(ends[name] - ends["softmax"])
        assert difference.interval_method == "studentised over items"
        assert f"{ends[name]:.4f}" in page
    assert (tmp_path / "study" / "figures" / "losses.svg").read_text().startswith("<?xml")
    assert "unconverted, MLP wider by what DIFF V2 adds" in page
    files = [path for path in (tmp_path / "study" / "runs").rglob("*.[sj]*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert before
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read_records(tmp_path / "study" / "results.json").runs == evidence.runs
