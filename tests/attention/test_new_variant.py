"""An attention variant that is defined in this file alone is trained, counted, saved, opened, evaluated and compared.

Nothing else in the package or its tests knows the variant: only the table has it while a test runs, and the processes of a
study find it by the variable DIFFTRANSFORMER_VARIANTS.
"""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.attention import VARIABLE, VARIANTS, Option, SoftmaxAttention, config_options, register, variants
from difftransformer.attention.differential import Differential
from difftransformer.errors import ConfigError
from difftransformer.families.llama import targets
from difftransformer.model import count
from difftransformer.train import checkpoints
from difftransformer_lab.analysis import read_records
from difftransformer_lab.cli.main import main
from difftransformer_lab.studies import recipe_from

STEPS = 4


class GatedAttention(SoftmaxAttention):
    """softmax(Q K^T / sqrt(D)) V, each head times a learned gate that starts at `gate_init`."""

    name: ClassVar[str] = "gated"
    label: ClassVar[str] = "Gated Transformer"
    description: ClassVar[str] = "gated softmax attention"
    config_options: ClassVar[dict[str, Option]] = {"gate_init": Option(float, 1.0)}
    fp32_parameters: ClassVar[tuple[str, ...]] = ("gate",)
    can_upcycle: ClassVar[bool] = False

    def __init__(self, embed_dim, num_heads, *, gate_init=1.0, **options):
        super().__init__(embed_dim, num_heads, **options)
        self.gate_init = gate_init
        self.gate = nn.Parameter(torch.empty(num_heads))
        self.init_own_parameters()

    @classmethod
    def arguments_of(cls, config, layer_index):
        return {"gate_init": cls.option(config, "gate_init")}

    @classmethod
    def own_parameters(cls, config):
        return cls.layout_of(config).num_heads

    def init_own_parameters(self, normal_=nn.init.normal_):
        normal_(self.gate, mean=self.gate_init, std=0.0)

    def finish(self, heads):
        return heads * self.gate.view(-1, 1, 1).to(heads.dtype)


@pytest.fixture(autouse=True)
def gated(monkeypatch):
    """The variant in the table, here and in the processes of a study."""
    monkeypatch.setitem(variants(), "gated", GatedAttention)
    here = Path(__file__)
    monkeypatch.setenv(VARIABLE, f"{here.stem}:{GatedAttention.__name__}")
    monkeypatch.setenv("PYTHONPATH", str(here.parent), prepend=":")


def gated_config(**fields):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 64}
    return DiffTransformerConfig(**sizes | {"attention_type": "gated", "gate_init": 0.5} | fields)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(gated_config(tie_word_embeddings=False, initializer_range=0.3)).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))


def test_it_computes_what_it_says(model, ids):
    """Gates of 1 give the twin's logits; a gate of 0 takes its head away."""
    twin = DiffTransformerForCausalLM(model.config.twin("softmax")).eval()
    twin.load_state_dict(model.state_dict(), strict=False)
    gates = [layer.self_attn.gate for layer in model.model.layers]
    assert all(torch.equal(gate, torch.full((4,), 0.5)) for gate in gates)
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, twin(ids).logits)
        for gate in gates:
            gate.fill_(1.0)
        torch.testing.assert_close(model(ids).logits, twin(ids).logits)
        gates[0][1] = 0.0
        twin.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0.0
        torch.testing.assert_close(model(ids).logits, twin(ids).logits)


def test_it_is_counted(model, ids):
    counts = count(model.config)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counts.parameters == count(model.config.twin("softmax")).parameters + 2 * 4
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert held == ids.numel() * count(model.config, cache_itemsize=4).kv_bytes_per_token


def test_it_can_have_qk_norm():
    """Which it does not know of: the base builds, counts and divides it."""
    normed = DiffTransformerForCausalLM(gated_config(qk_norm=True))
    assert normed.model.layers[0].self_attn.q_norm.weight.shape == (8,)
    assert count(normed.config).parameters == sum(parameter.numel() for parameter in normed.parameters())
    assert "layers.*.self_attn.k_norm" in normed.config.base_model_tp_plan


def test_it_generates_with_a_cache(model, ids):
    cached, whole = (
        model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=0)
        for use_cache in (True, False)
    )
    assert cached.shape == (2, 13)
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_saved_opened_and_carded(model, ids, tmp_path, dtype):
    model.save_pretrained(tmp_path / "gated")
    saved = json.loads((tmp_path / "gated" / "config.json").read_text())
    assert (saved["attention_type"], saved["gate_init"]) == ("gated", 0.5)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "gated", dtype=dtype)
    assert opened.model.layers[0].self_attn.gate.dtype == torch.float32
    assert opened.model.layers[0].self_attn.q_proj.weight.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(opened(ids).logits, model(ids).logits)
    card = (tmp_path / "gated" / "README.md").read_text()
    assert "| gate init | `0.5` |" in card
    assert "gated softmax attention (Gated Transformer, `gated`" in card


def test_its_option_is_checked():
    assert gated_config(attention_type="diff").gate_init == 0.5
    assert DiffTransformerConfig().gate_init == 1.0
    with pytest.raises(ConfigError, match="gate_init: expected float, got 'wide'"):
        gated_config(gate_init="wide")


def test_it_is_not_offered_for_conversion():
    assert targets() == ["softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex", "gate", "diff_gate"]


@pytest.fixture(scope="module")
def _study(tmp_path_factory):
    return tmp_path_factory.mktemp("gated") / "study"


@pytest.fixture
def study(toy, _study, tmp_path, warm_children):
    """A comparison with the plain Transformer, trained once."""
    toy["model"]["gate_init"] = 0.75
    toy["training"] |= {"steps": STEPS, "context_stages": [[0, 64]]}
    toy["evaluation"] = toy["evaluation"][:1]
    toy["compare"] = {"models": ["gated", "softmax"], "seeds": 1}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(toy))
    if not _study.exists():
        assert main(["compare", str(path), "--out", str(_study)]) == 0
    return _study


def test_a_recipe_checks_its_option(toy):
    toy["model"] |= {"attention_type": "gated", "gate_init": "wide"}
    with pytest.raises(ConfigError, match=r"model\.gate_init: expected float, got 'wide'"):
        recipe_from(toy, source="")


@pytest.mark.slow
def test_it_is_trained_and_compared(study):
    evidence = read_records(study / "results.json")
    assert [arm.label for arm in evidence.index.arms] == ["Gated Transformer", "Transformer"]
    gated, twin = evidence.index.sizes
    assert gated.parameters == twin.parameters + 2 * 4
    assert all(len(run.curves["train_loss_nats"].values) == STEPS for *_, run in evidence.every_run())
    assert "Gated Transformer" in (study / "index.html").read_text()
    trained = DiffTransformerForCausalLM.from_pretrained(checkpoints(study / "runs" / "gated-seed0")[-1])
    assert trained.config.gate_init == 0.75
    for layer in trained.model.layers:
        assert (layer.self_attn.gate != 0.75).all()


@pytest.mark.slow
def test_it_is_evaluated_by_a_task(study, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a line of words and another line of words\n" * 40)
    run = study / "runs" / "gated-seed0"
    options = ["--text", str(text), "--window", "32", "--windows", "2", "--out", str(tmp_path / "evaluated")]
    assert main(["eval", "perplexity", str(run), *options]) == 0
    assert list((tmp_path / "evaluated").rglob("*.json"))


class Clash(SoftmaxAttention):
    """Another type for an option that exists."""

    name = label = "clash"
    config_options: ClassVar[dict[str, Option]] = {"gate_init": Option(int, 1)}


class Impostor(SoftmaxAttention):
    """Another variant by a name that is taken."""

    label = "impostor"


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Impostor, "attention_type='softmax' is already SoftmaxAttention"),
        (Clash, "another variant has an option gate_init"),
        (Differential, "Differential has no defaults, label, name, twin_heads; a variant sets them in its class"),
    ],
)
def test_what_cannot_be_registered(cls, words):
    with pytest.raises(ConfigError, match=words):
        register(cls)
    assert "clash" not in VARIANTS
    assert VARIANTS["softmax"] is SoftmaxAttention


def test_without_the_table_it_is_refused(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path)
    monkeypatch.delitem(VARIANTS, "gated")
    assert "gate_init" not in config_options()
    with pytest.raises(ConfigError, match=r"attention_type='gated' is unknown.*DIFFTRANSFORMER_VARIANTS"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
