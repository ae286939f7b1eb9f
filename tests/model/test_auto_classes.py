"""transformers' Auto classes know the model in either order of import, and the command stays light."""

import subprocess
import sys
import textwrap

import pytest

from tests.support import fresh
from tests.support.missing import without
from tests.support.tiny_models import tiny

ORDERS = {
    "ours first, from_pretrained": """
        import difftransformer
        from transformers import AutoModelForCausalLM
        print(type(AutoModelForCausalLM.from_pretrained(FOLDER)).__name__)
    """,
    "theirs first": """
        import transformers, difftransformer
        from transformers import AutoModelForCausalLM
        print(type(AutoModelForCausalLM.from_pretrained(FOLDER)).__name__)
    """,
    "theirs loaded first": """
        from transformers import AutoModelForCausalLM
        import difftransformer
        print(type(AutoModelForCausalLM.from_pretrained(FOLDER)).__name__)
    """,
    "a model of theirs between, from_config": """
        import difftransformer
        from transformers.models.llama import modeling_llama
        from transformers import AutoConfig, AutoModelForCausalLM
        print(type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))).__name__)
    """,
    "pipeline between": """
        import difftransformer
        from transformers import AutoModelForCausalLM, pipeline
        print(type(AutoModelForCausalLM.from_pretrained(FOLDER)).__name__)
    """,
}


def python(code, *arguments):
    """What the code prints in a new interpreter."""
    words = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def last_line(code, folder):
    """The last line that the code prints in a process that knows torch and neither transformers nor this package."""
    ran = fresh.run(f"FOLDER = {str(folder)!r}\n" + textwrap.dedent(code))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_import(name, folder):
    assert last_line(ORDERS[name], folder) == "DiffTransformerForCausalLM"


def test_other_auto_classes(folder):
    names = last_line(
        """
        import difftransformer
        from transformers import AutoConfig, AutoModel
        config = AutoConfig.from_pretrained(FOLDER)
        made = AutoConfig.for_model("difftransformer", hidden_size=32, num_attention_heads=4)
        print(type(config).__name__, type(made).__name__, type(AutoModel.from_pretrained(FOLDER)).__name__)
        """,
        folder,
    )
    assert names == "DiffTransformerConfig DiffTransformerConfig DiffTransformerModel"


def test_transformers_alone_does_not_know_it(folder):
    """Else the tests above would show nothing."""
    kind = last_line(
        """
        from transformers import AutoConfig
        try:
            AutoConfig.from_pretrained(FOLDER)
        except (ValueError, KeyError) as error:
            print(type(error).__name__)
        """,
        folder,
    )
    assert kind in ("ValueError", "KeyError")


HEAVY = ("torch", "transformers", "numpy", "jsonargparse")


@pytest.mark.parametrize("missing", [("transformers",), ("torch", "transformers")])
def test_names_that_need_less_work_where_less_is_installed(missing):
    """What needs transformers says so, on first use."""
    code = without(*missing) + textwrap.dedent(
        """
        import difftransformer, difftransformer_lab.report
        assert "DiffTransformerForCausalLM" in dir(difftransformer)
        if "torch" not in sys.argv:
            import torch
            layer = difftransformer.DifferentialAttention(32, 2)
            assert layer(torch.zeros(1, 3, 32))[0].shape == (1, 3, 32)
            assert difftransformer.softmax_attention(*torch.zeros(3, 1, 1, 2, 8)).shape == (1, 1, 2, 8)
        try:
            difftransformer.DiffTransformerConfig
        except ImportError as error:
            print(error)
        """
    )
    assert "No module named 'transformers'" in python(code, *missing)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_command_line_is_light(arguments):
    loaded = python(
        f"""
        import runpy, sys
        sys.argv = ["difftransformer", *sys.argv[1:]]
        try:
            runpy.run_module("difftransformer_lab", run_name="__main__")
        except SystemExit as leaving:
            assert not leaving.code, leaving.code
        print()
        print([name for name in {HEAVY} if name in sys.modules])
        """,
        *arguments,
    )
    assert loaded.splitlines()[-1] == "[]"
    assert len(loaded.splitlines()) > 1
