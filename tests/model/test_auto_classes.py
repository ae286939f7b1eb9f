"""transformers' Auto classes know the model in either order of import, and the command stays light."""

import subprocess
import sys
import textwrap

import pytest

from tests.support import fresh
from tests.support.missing import without
from tests.support.tiny_models import tiny

ORDERS = {
    "ours first": """
import sys, difftransformer, difftransformer.serving
assert difftransformer.ops.differential_attention is difftransformer.differential_attention
from difftransformer.attention import DifferentialAttention
assert not {"transformers", "vllm"} & set(sys.modules)
from transformers import AutoModelForCausalLM
""",
    "theirs loaded first": """
from transformers import AutoConfig, AutoModelForCausalLM
try:
    AutoConfig.from_pretrained(FOLDER)
except (ValueError, KeyError):  # transformers alone does not know the model
    import difftransformer
""",
}
NAMES = """
from transformers import AutoConfig, AutoModel
config = AutoConfig.from_pretrained(FOLDER)
made = AutoConfig.for_model("difftransformer", hidden_size=32, num_attention_heads=4)
models = (AutoModelForCausalLM.from_pretrained(FOLDER), AutoModelForCausalLM.from_config(config))
AutoConfig.for_model("differential_family", family="qwen2", attention_type="diff_v2")
print(*(type(x).__name__ for x in (*models, config, made, AutoModel.from_pretrained(FOLDER))))
"""


def python(code, *arguments):
    """What the code prints in a new interpreter."""
    words = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_import(name, folder):
    """In a process that knows torch and neither transformers nor this package."""
    names = fresh.run(f"FOLDER = {str(folder)!r}\n{ORDERS[name]}\n{NAMES}").splitlines()[-1].split()
    configs = ["DiffTransformerConfig"] * 2
    assert names == ["DiffTransformerForCausalLM"] * 2 + configs + ["DiffTransformerModel"]


HEAVY = ("torch", "transformers", "numpy", "jsonargparse")


@pytest.mark.parametrize("missing", [("transformers",), ("torch", "transformers")])
def test_names_that_need_less_work_where_less_is_installed(missing):
    """What needs transformers says so, on first use."""
    code = without(*missing) + textwrap.dedent(
        """
        import difftransformer, difftransformer_lab.analysis
        assert "DiffTransformerForCausalLM" in dir(difftransformer)
        if "torch" not in sys.argv:
            import torch
            layer = difftransformer.DifferentialAttention(32, 2)
            output = layer(torch.ones(1, 3, 32))[0]
            output.sum().backward()
            assert output.shape == (1, 3, 32)
            assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
            assert difftransformer.softmax_attention(*torch.zeros(3, 1, 1, 2, 8)).shape == (1, 1, 2, 8)
        try:
            difftransformer.DiffTransformerConfig
        except ImportError as error:
            print(error)
        """
    )
    run = python if "torch" in missing else fresh.run
    assert "No module named 'transformers'" in run(code, *missing)


def test_command_line_is_light():
    loaded = python(
        f"""
        import runpy, sys
        for word in ("--help", "--version"):
            sys.argv = ["difftransformer", word]
            try:
                runpy.run_module("difftransformer_lab", run_name="__main__")
            except SystemExit as leaving:
                assert not leaving.code, leaving.code
            print()
            print(word, [name for name in {HEAVY} if name in sys.modules])
        """
    ).splitlines()
    place = loaded.index("--help []")
    assert place > 1
    assert loaded[-1] == "--version []"
    assert loaded[place + 1]
