"""Our model in vLLM itself: its engine on the CPU, and the names and parameters in the sources of a newer release.

`make .venv/.ready-vllm` installs the first and unpacks the second. Without them these tests are skipped, and fail in CI.
"""

import ast
import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.families import family_config
from tests.support.needed import lacking
from tests.support.tiny_models import scramble, tiny_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv" / "vllm"
SOURCES = {"0.32.0": PLACE / "lib", "0.33.0": PLACE / "newer"}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 70, 40)]
NEW = 16
SHAPE = {"vocab_size": 97, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}  # vLLM's CPU kernels: from 32
MODELS = {
    "softmax": {"attention_type": "softmax", "num_key_value_heads": 2},
    "diff": {"attention_type": "diff", "num_key_value_heads": 2},
    "softmax with a norm": {"attention_type": "softmax", "num_key_value_heads": 2, "softmax_head_norm": "gain"},
    "softmax with a factor": {"attention_type": "softmax", "softmax_head_scale": 1.7},
    "diff with a window": {"sliding_window": 7, "lambda_form": "scalar", "lambda_value": 0.6, "head_scale": 1.3},
    "diff with a narrow value": {"value_head_dim": 32, "lambda_form": "head", "head_norm": "none"},
    "diff_v2": {"attention_type": "diff_v2", "num_key_value_heads": 2},
    "diff_v2 with QK norm": {"attention_type": "diff_v2", "num_key_value_heads": 2, "qk_norm": True},
    "grouped_diff": {"attention_type": "grouped_diff", "num_attention_heads": 5, "num_key_value_heads": 2},
    "grouped_diff with more keys": {"attention_type": "grouped_diff", "num_attention_heads": 5},
    "grouped_diff_v2": {"attention_type": "grouped_diff_v2", "num_attention_heads": 10, "num_key_value_heads": 2},
    "dex": {"attention_type": "dex", "dex_heads": [[0, 2], [1, 3]]},
    "gate": {"attention_type": "gate", "num_key_value_heads": 2},
    "diff_gate": {"attention_type": "diff_gate"},
    "multiplied": {"embedding_multiplier": 3.3},
}
TIED = "diff_v2"
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# n-grams come last: with numba loaded, vLLM cannot start an engine with adapters in the same process.
OTHERS = {"Qwen3": {}, "adapter": {"enable_lora": True, "max_lora_rank": 8}, "n-grams": {"speculative_config": NGRAMS}}


def needed(path):
    if not path.exists():
        lacking(f"{path} does not exist; run `make .venv/.ready-vllm`")
    return path


@pytest.fixture
def served(tmp_path):
    """For each model: itself, and what vLLM's engine says of its folder."""
    python = needed(PLACE / "bin" / "python")
    place, models = tmp_path, {}
    for number, name in enumerate([*MODELS, *OTHERS]):
        if name == "Qwen3":
            network = qwen()
        else:
            fields = MODELS.get(name, MODELS["diff"])
            network = DiffTransformerForCausalLM(tiny_config(**SHAPE | fields, tie_word_embeddings=name == TIED))
        models[name] = scramble(network, number).eval()
        models[name].save_pretrained(place / f"{number:02}")
        if name == "adapter":
            adapt(models[name], place / f"{number:02}" / "adapter")
    folders = {name: str(place / f"{number:02}") for number, name in enumerate(models)}
    asked = {"prompts": PROMPTS, "new": NEW, "options": {folders[name]: how for name, how in OTHERS.items()}}
    done = subprocess.run(
        [python, Path(__file__).with_name("vllm_program.py"), *folders.values()],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line) for line in lines]
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


def qwen():
    """A Qwen3 made differential."""
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoModelForCausalLM.from_config(family_config("qwen3")(**SHAPE | sizes | ends))


@torch.no_grad()
def adapt(model, folder):
    """Write a LoRA adapter in PEFT's layout, and add its products to the model's weights."""
    rank, draw, tensors = 4, torch.Generator().manual_seed(5), {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            down = torch.randn(rank, module.in_features, generator=draw) / 16
            up = torch.randn(module.out_features, rank, generator=draw) / 16
            module.weight += 2 * up @ down
            name = f"base_model.model.model.layers.{name}"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    targets = sorted({name.split(".")[-3] for name in tensors})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


def test_the_engine(served):
    """Greedy tokens, of new prompts and of cached prefixes, and the heads that vLLM has: queries, keys, width."""
    tokens = {
        name: [
            model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
        for name, (model, _) in served.items()
    }
    # Tied random embeddings repeat a token; the others do not.
    assert all(max(map(len, map(set, rows))) > 4 for name, rows in tokens.items() if name != TIED)
    assert {name: result["tokens"] for name, (_, result) in served.items()} == {
        name: [rows, rows] for name, rows in tokens.items()
    }
    assert all(served[name][1]["cached"] == [0, 64, 32] for name in ("diff", "diff_v2"))
    assert {name: tuple(result["heads"].values()) for name, (_, result) in served.items()} == {
        "softmax": (4, 2, 32),
        "softmax with a norm": (4, 2, 32),
        "softmax with a factor": (4, 4, 32),
        "diff": (4, 1, 64),
        "diff with a window": (4, 2, 64),
        "diff with a narrow value": (4, 2, 64),
        "diff_v2": (8, 2, 32),
        "diff_v2 with QK norm": (8, 2, 32),
        "grouped_diff": (5, 1, 64),
        "grouped_diff with more keys": (8, 4, 64),
        "grouped_diff_v2": (10, 2, 32),
        "dex": (4, 4, 32),
        "gate": (4, 2, 32),
        "diff_gate": (4, 2, 64),
        "multiplied": (4, 2, 64),
        "Qwen3": (4, 1, 64),
        "adapter": (4, 1, 64),
        "n-grams": (4, 1, 64),
    }


@pytest.fixture(params=SOURCES)
def source(request):
    """The folder with the package `vllm`."""
    found = sorted(needed(SOURCES[request.param]).rglob("vllm/model_executor/models/llama.py"))
    return found[0].parents[2].parent


@cache
def module(root, name):
    """The definitions of a module's first level, by name: its syntax tree, or the module that it comes from."""
    path = root / name.replace(".", "/")
    path, package = (
        (path / "__init__.py", name) if path.is_dir() else (path.with_suffix(".py"), name.rpartition(".")[0])
    )
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            origin = ".".join(filter(None, (parent, node.module)))
            for alias in node.names:
                found |= (
                    module(root, origin) if alias.name == "*" else {alias.asname or alias.name: (origin, alias.name)}
                )
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def definition(root, name, attribute):
    """Where an import leads, through modules that import it themselves: the syntax tree, or None, and its module."""
    place = module(root, name).get(attribute)
    while isinstance(place, tuple):
        name, attribute = place
        place = module(root, name).get(attribute) if name.startswith("vllm") else None
    return place, name


def signature(root, origin, attribute, method="__init__"):
    """The parameters of a function, or of a class's method or its base's; None where they are not written in vLLM."""
    node, origin = definition(root, origin, attribute)
    if isinstance(node, ast.FunctionDef):
        return node.args
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == method:
                return part.args
        if any(isinstance(decorator, ast.Name) and decorator.id == "dataclass" for decorator in node.decorator_list):
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            names = [ast.arg("self"), *(ast.arg(field.target.id) for field in fields)]
            return ast.arguments(args=names, kwonlyargs=[], defaults=[field.value for field in fields if field.value])
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := signature(root, origin, base.id, method)):
                return found
    return None


def names_of(parameters):
    return [argument.arg for argument in (*parameters.args, *parameters.kwonlyargs)]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("vllm"):
            yield from ((node.module, alias.name) for alias in node.names)


OURS = sorted((ROOT / "src" / "difftransformer" / "serving").glob("*.py"))


def lazy(root, name, attribute):
    """Whether a package names the attribute in its table of lazy imports."""
    return name == "vllm" and f'"{attribute}"' in (root / "vllm" / "__init__.py").read_text()


def test_every_imported_name_exists(source):
    names = [pair for path in OURS for pair in imports(path)]
    assert len(names) > 20
    assert [pair for pair in names if not lazy(source, *pair) and definition(source, *pair)[0] is None] == []


def test_every_call_fits_a_signature(source):
    checked = 0
    for path in OURS:
        tree, origins = ast.parse(path.read_text()), {name: origin for origin, name in imports(path)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called, wanted = node.func, "__init__"
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
                called, wanted = called.value.func, called.attr  # AutoWeightsLoader(self).load_weights(...)
            if not isinstance(called, ast.Name) or called.id not in origins:
                continue
            parameters = signature(source, origins[called.id], called.id, wanted)
            given = [keyword.arg for keyword in node.keywords]
            if parameters is None:
                assert not given, (path.name, called.id)
                continue
            positional = [name for name in names_of(parameters)[: len(parameters.args)] if name != "self"]
            required = positional[len(node.args) : len(positional) - len(parameters.defaults)]
            assert len(node.args) <= len(positional), (path.name, called.id)
            assert set(required) <= set(given) <= set(names_of(parameters)), (path.name, called.id)
            checked += 1
    assert checked > 15
