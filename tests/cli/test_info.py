"""`difftransformer info --start`: the table of the first layers, what is wrong with them, and what cannot be measured."""

import math
import re

import pytest
import transformers
import yaml

from difftransformer.attention import variants
from difftransformer.families import family_config
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer_lab.cli.main import main

ROW = re.compile(r"^ *(\d+)((?: +\d+\.\d+)+) *$", re.MULTILINE)


@pytest.fixture
def start(capsys):
    """start(name): what is printed, and the numbers of the table by layer."""

    def run(name):
        assert main(["info", str(name), "--start"]) == 0
        text = capsys.readouterr().out
        rows = {int(layer): [float(cell) for cell in cells.split()] for layer, cells in ROW.findall(text)}
        return text, rows

    return run


def test_a_preset_and_its_twin(start):
    """By fan-in: heads of size 1 - lambda_init = 0.8 become 0.8 / sqrt(3) beside embeddings of size 1."""
    text, rows = start("tiny")
    assert list(rows) == [0, 1]
    stream, attention, _, ratio, twin_stream, twin_attention, _, twin_ratio = rows[0]
    assert stream == twin_stream == pytest.approx(1, rel=0.05)
    assert attention == pytest.approx(0.8 / math.sqrt(3), rel=0.1)
    assert ratio == pytest.approx(attention / stream, abs=0.01)
    assert twin_ratio == pytest.approx(twin_attention / twin_stream, abs=0.01)
    assert "tiny at step 0, all layers: RMS on 256 random tokens" in text
    assert "initialization: fan_in, embedding_multiplier: 8" in text
    for word in ("diff", "softmax"):
        assert f"{word}: no branch starts more than 5 times as large as the residual stream that it joins." in text
    assert "fresh weights" not in text
    assert max(map(len, text.partition("tiny at")[0].splitlines())) <= 80


def test_a_recipe(start, toy, tmp_path):
    """With a normal start the embeddings are drowned; the text and its tokenizer need not be there."""
    toy["model"] = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "initialization": "normal"}
    toy["data"] |= {"source": "nowhere"}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy))
    text, rows = start(path)
    assert rows[0][3] == pytest.approx(0.8 * math.sqrt(128), rel=0.1)
    assert "initialization: normal (initializer_range 0.02), embedding_multiplier: 1" in text
    said = (
        r"^diff: the attention of layer 0 starts [89]\.\d times .* embeddings .*; start with initialization: fan_in\.$"
    )
    assert re.search(said, text, re.MULTILINE)
    assert "softmax: no branch starts more than" in text
    assert "fresh weights" not in text


def test_sizes_of_a_recipe(toy_file, capsys):
    """In a pipe, one table with a row for every type, whose numbers are on one line; what all share stands below."""
    assert main(["info", str(toy_file)]) == 0
    text = capsys.readouterr().out
    assert "(recipe)" in text
    assert re.findall(r"^ +(\w+) +\d.* [\d,]+ +$", text, re.MULTILINE) == [*variants()]
    assert re.search(r"The same for all: layers \d+, hidden size [\d,]+, ", text)


def test_no_number_of_a_narrow_table_is_broken(monkeypatch, capsys):
    monkeypatch.setattr("difftransformer_lab.cli.console.console.width", 80)
    assert main(["info", "6.8b"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.partition("The same")[0].splitlines())) <= 80
    for word, parameters in {"softmax": "6,853,627,904", "grouped_diff_v2": "6,319,902,720"}.items():
        assert re.search(rf"^ +{word} .* {parameters} ", text, re.MULTILINE)


@pytest.mark.parametrize(("kind", "row"), [("Llama", "softmax"), ("DiffLlama", "diff")])
def test_sizes_of_the_layouts_that_export_writes(kind, row, tmp_path, capsys):
    """In the row of softmax or diff stands what transformers' own model has."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    (cells,) = re.findall(rf"^ +{row} +(.*)$", capsys.readouterr().out, re.MULTILINE)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).num_parameters()
    assert f"{theirs:,}" in cells.split()


def test_training_of_a_recipe(capsys, fails):
    """FLOPs by hand, and weights that eight processes share."""
    assert main(["info", "paper-3b", "--processes", "8", "--set", "training.accumulation=128"]) == 0
    text = capsys.readouterr().out
    rows = {line[1:20].strip(): line[20:].split() for line in text[text.index("Training on") :].splitlines()}
    assert rows["FLOPs"] == [f"{350_002_085_888 * 22_988_316_672:.3g}"] * 2
    assert rows["weights, GiB"] == [f"{4 * 3_479_153_664 / 8 / 2**30:.2f}"] * 2
    parts = [float(cells[0]) for label, cells in rows.items() if label.endswith("GiB") and label != "together, GiB"]
    assert sum(parts) == pytest.approx(float(rows["together, GiB"][0]), abs=0.04)
    line = fails("info", "paper-3b", "--processes", "7")
    assert "must be a multiple of 28672" in line
    assert "--processes and --set are for recipes" in fails("info", "tiny", "--processes", "8")


@pytest.mark.parametrize(
    ("heads", "words"),
    [(4, "it is 683. model.multiple_of: 16 in a recipe makes it 688."), (3, "")],  # 8 / 3 of 256, and of 192: 512
)
def test_a_width_that_quantized_kernels_refuse(heads, words, tmp_path, capsys):
    DiffTransformerConfig(hidden_size=64 * heads, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert words in printed
    assert ("multiple_of" in printed) == bool(words)


def test_a_shipped_recipe(start):
    text, rows = start("demo")
    assert len(rows) == 2
    assert "demo at step 0" in text


def test_a_saved_model_is_measured_with_fresh_weights(start, tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 50}
    config = DiffTransformerConfig(attention_type="softmax", initialization="normal", **sizes)
    model = DiffTransformerForCausalLM(config)
    model.model.embed_tokens.weight.data.mul_(100)
    model.save_pretrained(tmp_path)
    text, rows = start(tmp_path)
    assert rows[0][0] == pytest.approx(0.02, rel=0.1)
    assert len(rows[0]) == 4  # a Transformer is its own twin
    assert "Measured with fresh weights: this is how the configuration starts, not what was trained." in text


def test_few_layers_of_a_large_preset(start, monkeypatch):
    monkeypatch.setattr("difftransformer.model.start_sizes.MOST_BYTES", 3 * 4 * 12 * 512**2)
    text, rows = start("small")
    assert list(rows) == [0, 1]
    assert "small at step 0, the first 2 of 8 layers" in text
    monkeypatch.setattr("difftransformer.model.start_sizes.MOST_BYTES", 1)
    text, rows = start("small")
    assert list(rows) == [0]
    assert "small at step 0, the first of 8 layers" in text


def test_what_has_no_start(fails, tmp_path):
    line = fails("info", "backends", "--start")
    assert "backends is not a model; name a preset, a recipe or a folder with config.json to use --start" in line
    line = fails("info", "4b", "--start")
    assert "'4b' is neither a preset (tiny, small," in line
    assert "nor a recipe (ablation, demo," in line
    shape = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    }  # fmt: skip
    family_config("qwen3")(**shape, num_key_value_heads=2, vocab_size=40).save_pretrained(tmp_path)
    line = fails("info", tmp_path, "--start")
    assert "model_type is 'differential_family', and --start takes 'difftransformer'" in line
