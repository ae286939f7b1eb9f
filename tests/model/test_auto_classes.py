"""transformers' Auto classes know the model in either order of import, and importing the package stays light."""

import os
import subprocess
import sys

import pytest

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


def python(code, *, folder="", arguments=()):
    code = f"FOLDER = {str(folder)!r}\n" + "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_import(name, folder):
    assert python(ORDERS[name], folder=folder).splitlines()[-1] == "DiffTransformerForCausalLM"


def test_other_auto_classes(folder):
    names = python(
        """
        import difftransformer
        from transformers import AutoConfig, AutoModel
        config = AutoConfig.from_pretrained(FOLDER)
        made = AutoConfig.for_model("difftransformer", hidden_size=32, num_attention_heads=4)
        print(type(config).__name__, type(made).__name__, type(AutoModel.from_pretrained(FOLDER)).__name__)
        """,
        folder=folder,
    )
    assert names.splitlines()[-1] == "DiffTransformerConfig DiffTransformerConfig DiffTransformerModel"


def test_transformers_alone_does_not_know_it(folder):
    """Else the tests above would show nothing."""
    kind = python(
        """
        from transformers import AutoConfig
        try:
            AutoConfig.from_pretrained(FOLDER)
        except (ValueError, KeyError) as error:
            print(type(error).__name__)
        """,
        folder=folder,
    )
    assert kind.splitlines()[-1] in ("ValueError", "KeyError")


HEAVY = ("torch", "transformers", "numpy")


def test_import_is_light():
    loaded = python(
        f"""
        import sys
        import difftransformer, difftransformer.model
        from difftransformer.model.presets import PRESETS
        assert "DiffTransformerForCausalLM" in dir(difftransformer)
        print([name for name in {HEAVY} if name in sys.modules])
        """
    )
    assert loaded == "[]"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_command_line_is_light(arguments):
    loaded = python(
        f"""
        import runpy, sys
        sys.argv = ["difftransformer", *sys.argv[1:]]
        try:
            runpy.run_module("difftransformer", run_name="__main__")
        except SystemExit as leaving:
            assert not leaving.code, leaving.code
        print()
        print([name for name in {HEAVY} if name in sys.modules])
        """,
        arguments=arguments,
    )
    assert loaded.splitlines()[-1] == "[]"
    assert len(loaded.splitlines()) > 1
