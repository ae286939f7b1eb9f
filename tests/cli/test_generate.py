"""`difftransformer generate`: the words of the command against `generate` of transformers, and every refusal on one line."""

import functools
import io
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoTokenizer, DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import byte_tokenizer
from difftransformer.families import acceleration
from difftransformer.model.transformers_errors import quietly
from difftransformer.train import checkpoints
from difftransformer_lab.cli.main import main
from difftransformer_lab.printable import printable
from tests.support import fresh

SIZES = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SIZES |= {"max_position_embeddings": 64}
KINDS = {
    "diff": lambda: DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)),
    "softmax": lambda: DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, attention_type="softmax")),
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}
PROMPT = "Once upon a time"


@pytest.fixture(scope="session")
def _saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def saved(_saved, tmp_path):
    """Save a model of a kind with the byte tokenizer, once, and return a copy of its folder."""

    def save(kind="diff"):
        if not (_saved / kind).exists():
            torch.manual_seed(1)
            model = KINDS[kind]()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" not in name:
                        parameter.mul_(8)
            model.generation_config.eos_token_id = None
            with quietly():
                model.save_pretrained(_saved / kind)
            byte_tokenizer().save(_saved / kind)
        shutil.copytree(_saved / kind, tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.fixture
def generate(capsys):
    """Run the command and return what it printed."""

    def run(*words, status=0):
        assert main(["generate", *map(str, words)]) == status, capsys.readouterr().err
        captured = capsys.readouterr()
        assert captured.out.endswith("\n")
        return captured.out[:-1]

    return run


@pytest.fixture
def fails(fails):
    return functools.partial(fails, "generate")


def expected(folder, text=PROMPT, new=20, seed=None, **options):
    """The same by hand, with the model as it is saved."""
    kind = {"diffllama": DiffLlamaForCausalLM, "llama": LlamaForCausalLM}.get(folder.name, DiffTransformerForCausalLM)
    model, tokenizer = kind.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([list(text.encode())])
    if seed is not None:
        torch.manual_seed(seed)
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 257} | options
    out = model.generate(ids, max_new_tokens=new, **options)
    return printable(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy(saved, generate, kind):
    folder = saved(kind)
    text = generate(folder, PROMPT, "--max-new-tokens", 20)
    assert text == expected(folder)
    assert len(set(text)) > 3
    assert generate(folder, PROMPT, "--max-new-tokens", 20, "--cache", "static") == text


def test_draws(saved, generate):
    folder = saved()
    words = [folder, PROMPT, "--max-new-tokens", 20, "--temperature", 2.5]
    first = generate(*words)
    assert first == expected(folder, seed=0, do_sample=True, temperature=2.5, top_k=0, top_p=1.0)
    assert generate(*words, "--seed", 0) == first
    assert generate(*words, "--seed", 1) != first
    narrow = generate(*words, "--top-k", 3, "--top-p", 0.9)
    assert narrow == expected(folder, seed=0, do_sample=True, temperature=2.5, top_k=3, top_p=0.9)
    assert generate(*words, "--top-k", 1) == expected(folder)


def test_settings_saved_with_the_model_do_not_act(saved, generate):
    folder = saved()
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 7, "top_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert generate(folder, PROMPT, "--max-new-tokens", 20) == expected(folder)


def test_beams(saved, generate):
    folder = saved()
    text = generate(folder, PROMPT, "--max-new-tokens", 20, "--num-beams", 3)
    assert text == expected(folder, num_beams=3)


def test_dtype(saved, generate, monkeypatch):
    used = []
    real = DiffTransformerForCausalLM.generate

    def watched(self, *args, **options):
        used.append(self.dtype)
        return real(self, *args, **options)

    monkeypatch.setattr(DiffTransformerForCausalLM, "generate", watched)
    folder = saved()
    for dtype in ("bf16", "auto"):
        generate(folder, PROMPT, "--max-new-tokens", 2, "--dtype", dtype)
    assert used == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kind", ["diff", "diffllama"])
def test_backend(saved, generate, fails, kind):
    folder = saved(kind)
    words = [folder, PROMPT, "--max-new-tokens", 20]
    assert generate(*words, "--backend", "reference") == generate(*words)
    assert "no backend is named 'fast'" in fails(*words, "--backend", "fast")
    if not torch.cuda.is_available():
        assert "backend 'cudnn' cannot run this problem" in fails(*words, "--backend", "cudnn")


def test_diffllama_is_accelerated(saved, generate, monkeypatch):
    calls = []
    op = acceleration.normed_differential_attention
    monkeypatch.setattr(acceleration, op.__name__, lambda *a, **options: calls.append(0) or op(*a, **options))
    generate(saved("diffllama"), PROMPT, "--max-new-tokens", 3)
    assert len(calls) == 6


def test_prompts(saved, generate, tmp_path, monkeypatch):
    folder = saved()
    words = ["--max-new-tokens", 20]
    text = generate(folder, "Größe ☃", *words)
    assert text == expected(folder, "Größe ☃")
    (tmp_path / "prompt.txt").write_text("Größe ☃\n", encoding="utf-8")
    assert generate(folder, "--prompt-file", tmp_path / "prompt.txt", *words) == text
    monkeypatch.setattr(sys, "stdin", io.StringIO("Größe ☃"))
    assert generate(folder, *words) == text
    assert generate(*words, folder, "Größe ☃") == text


def test_chat(saved, generate, fails):
    folder = saved()
    assert f"the tokenizer in {folder} has no chat template" in fails(folder, PROMPT, "--chat")
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    text = generate(folder, "Hello", "--chat", "--max-new-tokens", 20)
    assert text == expected(folder, "[user] Hello\n[assistant] ")
    assert generate(folder, "--chat", "Hello", "--max-new-tokens", 20) == text
    assert generate("--max-new-tokens", 20, folder, "--chat", "true", "--", "Hello") == text


def test_a_run_and_its_checkpoint(toy_file, tmp_path, generate):
    run = tmp_path / "run"
    assert main(["train", str(toy_file), "--out", str(run)]) == 0
    texts = [generate(folder, "the ", "--max-new-tokens", 12).split("\n")[-1] for folder in (run, checkpoints(run)[-1])]
    assert texts[0].endswith(texts[1])
    (checkpoints(run)[-1] / "model.safetensors").write_bytes(b"cut")
    assert main(["generate", str(run), "the "]) == 2


def test_room(saved, generate, fails, capsys):
    folder = saved()
    text = generate(folder, "x" * 60, "--max-new-tokens", 20)
    assert text == expected(folder, "x" * 60, new=4)
    main(["generate", str(folder), "x" * 60, "--max-new-tokens", "20"])
    assert "the model has positions for 4 new tokens" in capsys.readouterr().err
    for count in (64, 200):
        said = fails(folder, "x" * count)
        assert f"the prompt has {count} tokens, and the model 64 positions" in said
        assert "shorten PROMPT or the text of --prompt-file" in said


@pytest.mark.parametrize(("words", "message"), [
    (["--max-new-tokens", 0], "--max-new-tokens 0: give at least 1"),
    (["--num-beams", 0], "--num-beams 0: give at least 1"), (["--temperature", -1], "--temperature -1"),
    (["--temperature", "nan"], "temperature"), (["--temperature", 1, "--top-p", 0], "--top-p 0"),
    (["--temperature", 1, "--top-p", 1.5], "--top-p 1.5: give a probability"),
    (["--temperature", 1, "--top-k", 0], "--top-k 0: give at least 1"),
    (["--top-k", 5], "--top-k 5 is for sampling"), (["--top-p", 0.5], "--top-p 0.5 is for sampling"),
    (["--device", "tpu"], "--device tpu"), (["--dtype", "int4"], "int4"), (["--cache", "paged"], "paged"),
    (["--seed", "many"], "seed"), (["--prompt-file", "x.txt"], "a prompt and --prompt-file were given"),
])  # fmt: skip
def test_wrong_words(saved, fails, words, message):
    assert message in fails(saved(), PROMPT, *words)


def test_wrong_prompts(saved, fails, tmp_path, monkeypatch):
    folder = saved()
    assert "the prompt is empty" in fails(folder, "")
    assert "the prompt is empty" in fails(folder, " \n")
    assert "--prompt-file nowhere.txt: No such file or directory; give" in fails(folder, "--prompt-file", "nowhere.txt")
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfer")
    assert "latin.txt: not UTF-8" in fails(folder, "--prompt-file", tmp_path / "latin.txt")
    assert "the prompt: not UTF-8" in fails(folder, "gr\udcf6")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "standard input is empty" in fails(folder)
    terminal = io.StringIO("")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "no prompt: give it after the model" in fails(folder)


def test_wrong_folders(saved, fails, tmp_path):
    assert "nowhere: no such folder" in fails("nowhere", PROMPT)
    (tmp_path / "empty").mkdir()
    assert "no checkpoint here" in fails(tmp_path / "empty", PROMPT)
    folder = saved()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / f"{name}.away")
    assert f"{folder}: no tokenizer here" in fails(folder, PROMPT)
    (folder / "tokenizer.json").write_text("{")
    assert f"{folder / 'tokenizer.json'}: its tokenizer cannot be opened" in fails(folder, PROMPT)


def test_wrong_models(saved, fails):
    folder = saved("llama")
    line = fails(folder, PROMPT, "--backend", "chunked")
    assert "a 'llama' model, which does not use this package's attention" in line
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors is cut short or damaged" in fails(folder, PROMPT)
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in fails(folder, PROMPT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "missing weight model.layers.2." in fails(folder, PROMPT)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    assert "cannot be opened" in fails(folder, PROMPT)


def test_no_code_of_a_folder_runs(saved, fails, tmp_path):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    there = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": there}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "cannot be opened" in fails(folder, PROMPT)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_of_another_model(saved, fails, capsys):
    folder = saved()
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES | {"vocab_size": 90}))
    model.save_pretrained(folder)
    capsys.readouterr()
    assert "the tokenizer gives token 112, and the model has 90" in fails(folder, "pop")


def test_words_come_one_by_one_and_ctrl_c_ends(saved, tmp_path):
    """The first words are there long before the last; after Ctrl-C what was printed stays, and the exit status is 130."""
    folder = saved()
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES | {"max_position_embeddings": 100_000}))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = ["generate", str(folder), PROMPT, "--max-new-tokens", "90000", "--temperature", "2"]
    command = [sys.executable, "-m", "difftransformer_lab", *words]
    process = fresh.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        first = process.stdout.read(10)
        assert len(first) == 10
        assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert rest.endswith(b"\n")
