"""Pretrained models made differential: the same function at the start, parameters that learn, refusals that name the cause."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from difftransformer import DiffTransformerForCausalLM
from difftransformer.errors import CheckpointError, ConfigError
from difftransformer.families import convert_folder, upcycle_folder
from difftransformer.families.checkpoint_io import WeightsReader
from difftransformer.families.llama import from_llama, targets
from difftransformer.hub import source_folder
from difftransformer.hub.deferred import deferred
from difftransformer_lab.evals.drift import measure_drift
from tests.families import test_convert_refusals as refusals

TARGETS = tuple(targets())
DIFFERENTIAL = tuple(name for name in TARGETS if name != "softmax")
BASE = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
BASE |= {"max_position_embeddings": 64}
ROUNDED = 5e-5
"""Of logits, by the fp32 in which stock norms and rotary tables compute: 1.4e-5 was met, and processors round differently."""
SOURCES = {
    "three heads": (LlamaConfig, {"num_attention_heads": 3, "tie_word_embeddings": True}),
    "grouped, untied": (LlamaConfig, {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "head_dim free": (LlamaConfig, {"num_attention_heads": 4, "head_dim": 6, "rms_norm_eps": 0.02}),
    "three of one key, scaled rotary": (
        LlamaConfig,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral with a window": (MistralConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}),
}  # fmt: skip


def saved(folder, config_class=LlamaConfig, **fields):
    """A model with weights large enough that attention matters, saved."""
    fields = {"num_attention_heads": 4} | fields
    classes = {LlamaConfig: LlamaForCausalLM, MistralConfig: MistralForCausalLM}
    torch.manual_seed(3)
    model = classes[config_class](config_class(**BASE | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def ids_of(length=21, rows=2):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *(("grouped, untied", to) for to in TARGETS),
        *(("three heads", to) for to in ("diff", "grouped_diff", "dex")),
        *(("head_dim free", to) for to in ("diff_v2", "gate")),
        *(("three of one key, scaled rotary", to) for to in ("diff", "grouped_diff_v2", "diff_gate")),
        ("mistral with a window", "diff"),
    ],
)
def test_same_function_at_the_start(name, to, tmp_path):
    """The stock model's logits, whose norms and rotary tables round to fp32, and its greedy continuation."""
    config_class, fields = SOURCES[name]
    stock = saved(tmp_path / "source", config_class, **fields)
    done = upcycle_folder(tmp_path / "source", tmp_path / "made", to=to)
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made")
    torch.testing.assert_close(ours.double()(ids_of()).logits, stock.double()(ids_of()).logits, rtol=0, atol=ROUNDED)
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(ids_of(9), **greedy), stock.generate(ids_of(9), **greedy))
    built = sum(parameter.numel() for parameter in ours.parameters())
    assert done.parameters == built
    assert done.added_parameters == built - sum(parameter.numel() for parameter in stock.parameters())
    assert done.added_parameters > 0 or to == "softmax"


@torch.no_grad()
@pytest.mark.parametrize("size", ["1GB", "10KB"], ids=["one file", "several"])
def test_frequencies_of_rotation_in_old_files(size, tmp_path):
    """Files of Llama 2 hold a buffer of each layer, which models compute themselves today."""
    stock = saved(tmp_path / "llama", tie_word_embeddings=False)
    state = stock.state_dict()
    state |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(6) for layer in range(3)}
    stock.save_pretrained(tmp_path / "old", state_dict=state, max_shard_size=size)
    files = list((tmp_path / "old").glob("*.safetensors"))
    assert (len(files) > 1) == (size == "10KB")
    assert sum(name.endswith("inv_freq") for path in files for name in load_file(path)) == 3
    upcycle_folder(tmp_path / "old", tmp_path / "upcycled", to="diff")
    convert_folder(tmp_path / "old", tmp_path / "converted", to="difftransformer")
    for name in ("upcycled", "converted"):
        ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(ours(ids_of()).logits, stock(ids_of()).logits, rtol=0, atol=1e-4)
    with WeightsReader(tmp_path / "old") as weights:
        parts = deferred(stock.config, weights)
        parts.fill("cpu")
    assert torch.equal(parts.network(ids_of()).logits, stock(ids_of()).logits)


@pytest.mark.parametrize("to", DIFFERENTIAL)
def test_the_plain_model_to_the_last_digit(to, tmp_path):
    """In float64 nothing hides behind rounding."""
    saved(tmp_path / "source", num_attention_heads=3)
    models = []
    for name in (to, "softmax"):
        upcycle_folder(tmp_path / "source", tmp_path / name, to=name)
        models.append(DiffTransformerForCausalLM.from_pretrained(tmp_path / name).double())
    first, second = (model(ids_of()).logits for model in models)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("diff", {"lambda_form": "token"}),
        ("diff", {"lambda_form": "head", "shared_key": True}),
        ("diff_v2", {"lambda_form": "layer"}),
        ("diff_v2", {"lambda_form": "scalar", "shared_key": False}),
        ("grouped_diff", {"lambda_form": "token"}),
        ("grouped_diff", {"lambda_form": "scalar"}),
        ("grouped_diff_v2", {"lambda_form": "head"}),
        ("grouped_diff_v2", {"lambda_form": "layer", "output_gate": False}),
    ],
)
def test_options_away_from_their_defaults_keep_the_function(to, options, tmp_path):
    stock = saved(tmp_path / "source", num_attention_heads=6, num_key_value_heads=2)
    upcycle_folder(tmp_path / "source", tmp_path / "made", to=to, **options)
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made")
    assert all(getattr(ours.config, name) == value for name, value in options.items())
    torch.testing.assert_close(ours.double()(ids_of()).logits, stock.double()(ids_of()).logits, rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("to", DIFFERENTIAL)
def test_everything_new_learns(to, tmp_path):
    """lambda and gates from the first step; what only lambda lets through, from the second."""
    stock = saved(tmp_path / "source", num_attention_heads=3)
    upcycle_folder(tmp_path / "source", tmp_path / "made", to=to)
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made").train()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-2)
    loss = ours(ids_of(), labels=ids_of()).loss
    loss.backward()
    early = [p for name, p in ours.named_parameters() if "lambda" in name or "self_attn.gate_proj" in name]
    assert early
    assert all(parameter.grad.any() for parameter in early)
    optimizer.step()
    optimizer.zero_grad()
    ours(ids_of(), labels=ids_of()).loss.backward()
    own = {name: p for name, p in ours.named_parameters() if "self_attn" in name}
    assert all(parameter.grad.any() for parameter in own.values())
    for name, parameter in own.items():
        if to == "diff" and name.endswith(("q_proj.weight", "k_proj.weight")):
            first, second = parameter.grad.unflatten(0, (3, 2, -1)).unbind(1)
            assert not torch.equal(first, second)
    assert set(own) >= {name for name, _ in stock.named_parameters() if "self_attn" in name}


@pytest.mark.parametrize("matched", ["diff", "grouped_diff_v2"])
def test_the_plain_model_with_as_many_parameters(matched, tmp_path):
    """Wider MLPs that add nothing at the start, and learn: down_proj at once, gate_proj and up_proj after it."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 37}
    stock = saved(tmp_path / "source", **fields)
    wide, other = (upcycle_folder(tmp_path / "source", tmp_path / to, to=to) for to in (f"softmax+{matched}", matched))
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / f"softmax+{matched}")
    assert ours.config.attention_type == "softmax"
    assert abs(wide.parameters - other.parameters) <= 1.5 * ours.config.hidden_size * ours.config.num_hidden_layers
    width = ours.config.intermediate_size
    assert wide.added_parameters == 3 * ours.config.hidden_size * ours.config.num_hidden_layers * (width - 37) > 0
    torch.testing.assert_close(ours.double()(ids_of()).logits, stock.double()(ids_of()).logits, rtol=0, atol=ROUNDED)
    mlp = ours.model.layers[1].mlp
    assert mlp.gate_proj.weight[37:].std().item() == pytest.approx(ours.config.initializer_range, rel=0.3)
    assert not torch.equal(mlp.gate_proj.weight[37:], mlp.up_proj.weight[37:])
    assert not mlp.down_proj.weight[:, 37:].any()
    ours.train()(ids_of(), labels=ids_of()).loss.backward()
    assert mlp.down_proj.weight.grad[:, 37:].any()
    assert not mlp.gate_proj.weight.grad[37:].any()
    with torch.no_grad():
        mlp.down_proj.weight -= 0.1 * mlp.down_proj.weight.grad
    ours(ids_of(), labels=ids_of()).loss.backward()
    assert mlp.gate_proj.weight.grad[37:].any()
    assert mlp.up_proj.weight.grad[37:].any()


def test_what_is_drawn_follows_the_seed(tmp_path):
    saved(tmp_path / "source")
    weights = []
    for place, seed in (("a", 0), ("b", 0), ("c", 1)):
        upcycle_folder(tmp_path / "source", tmp_path / place, to="dex", seed=seed)
        weights.append(load_file(tmp_path / place / "model.safetensors"))
    name = "model.layers.1.self_attn.dex_proj"
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert not torch.equal(weights[0][name], weights[0]["model.layers.0.self_attn.dex_proj"])
    assert weights[0][name].std().item() == pytest.approx(12**-0.5, rel=0.15)


def test_chosen_heads(tmp_path):
    stock = saved(tmp_path / "source")
    upcycle_folder(tmp_path / "source", tmp_path / "made", to="dex", dex_heads=[[1], [0], [3]])
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made")
    assert [layer.self_attn.dex_heads for layer in ours.model.layers] == [(1,), (0,), (3,)]
    torch.testing.assert_close(ours(ids_of()).logits, stock(ids_of()).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chosen", [None, [[1, 3], [3, 0], [2, 1]]])
@torch.no_grad()
def test_dex_becomes_a_llama_again(chosen, tmp_path):
    """With trained maps of its outputs: they are linear, so that o_proj takes them in."""
    saved(tmp_path / "source")
    upcycle_folder(tmp_path / "source", tmp_path / "made", to="dex", dex_heads=chosen)
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made")
    before = ours(ids_of()).logits
    for layer in ours.model.layers:
        layer.self_attn.dex_lambda.copy_(torch.randn(layer.self_attn.dex_lambda.shape) / 2)
    ours.save_pretrained(tmp_path / "trained")
    convert_folder(tmp_path / "trained", tmp_path / "llama", to="llama")
    theirs, expected = LlamaForCausalLM.from_pretrained(tmp_path / "llama")(ids_of()).logits, ours(ids_of()).logits
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(theirs, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_lambdas_stay_wide(dtype, tmp_path):
    saved(tmp_path / "source").to(dtype).save_pretrained(tmp_path / "narrow")
    for to in TARGETS:
        upcycle_folder(tmp_path / "narrow", tmp_path / to, to=to)
        for name, tensor in load_file(tmp_path / to / "model.safetensors").items():
            wide = name.rpartition(".")[2] in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
            assert tensor.dtype == (torch.float32 if wide else dtype), name


def test_what_travels_along(tmp_path):
    saved(tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "training.log"):
        (tmp_path / "source" / name).write_text(name)
    done = upcycle_folder(tmp_path / "source", tmp_path / "made", to="diff_v2").converted
    assert done.left_behind == ("training.log",)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "made" / name).read_text() == name


@pytest.mark.parametrize(
    "to", [to if to in ("diff", "dex") else pytest.param(to, marks=pytest.mark.slow) for to in TARGETS]
)
def test_drift_is_measured(to, tmp_path):
    """None of a conversion; that of a changed weight, against the two models' logits."""
    stock = saved(tmp_path / "source", num_attention_heads=3)
    upcycle_folder(tmp_path / "source", tmp_path / "made", to=to)
    ids = ids_of(60, 1)[0]
    drift = measure_drift(tmp_path / "source", tmp_path / "made", ids, greedy_tokens=20)
    assert drift.largest_logit_difference < 1e-4
    assert (drift.tokens, drift.greedy_tokens, drift.greedy_same_tokens) == (60, 20, 20)
    assert drift.largest_logit == pytest.approx(stock(ids[None]).logits.abs().max().item(), rel=1e-4)
    weights = load_file(tmp_path / "made" / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, tmp_path / "made" / "model.safetensors", metadata={"format": "pt"})
    changed = DiffTransformerForCausalLM.from_pretrained(tmp_path / "made")
    a, b = stock(ids[None]).logits[0].detach(), changed(ids[None]).logits[0].detach()
    drift = measure_drift(tmp_path / "source", tmp_path / "made", ids, greedy_tokens=34)
    assert drift.largest_logit_difference == pytest.approx((a - b).abs().max().item(), rel=1e-3)
    divergence = torch.nn.functional.kl_div(b.log_softmax(-1), a.softmax(-1), reduction="batchmean").item()
    assert drift.mean_kl_nats == pytest.approx(divergence, rel=1e-3)
    same = continued(stock, ids[:30], 34) == continued(changed, ids[:30], 34)
    assert drift.greedy_same_tokens == same.tolist().index(False) < same.sum()  # they agree again later


@torch.no_grad()
def continued(model, prompt, tokens):
    """The likeliest tokens, one by one, without a cache."""
    for _ in range(tokens):
        prompt = torch.cat([prompt, model(prompt[None]).logits[0, -1:].argmax(-1)])
    return prompt[-tokens:]


def refusal(tmp_path, error, to="diff", **options):
    return refusals.refusal(tmp_path, error, to=to, convert=upcycle_folder, **options)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"model_type": "vit"}, ("model_type='vit' cannot be made differential: it is not a language model",)),
            ({"model_type": None}, ("model_type='None' is not supported", "qwen3, qwen3_moe")),
            ({"quantization_config": {"bits": 4}}, ("quantization_config", "before it is quantized")),
            ({"hidden_act": "mystery"}, ("mystery",)),
            ({"num_attention_heads": "many"}, ("num_attention_heads",)),
        ],
    )
    def test_configurations(self, fields, words, tmp_path):
        saved(tmp_path / "source")
        refusals.edit_config(tmp_path / "source", **fields)
        message = refusal(tmp_path, ConfigError)
        assert all(word in message for word in words), message

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"to": "grouped"},
                "--to 'grouped' is unknown; choose one of softmax, diff, diff_v2, grouped_diff, grouped_diff_v2, dex",
            ),
            ({"head_norm": "gain"}, "head_norm='gain': a headwise norm discards the size of each row"),
            ({"head_norm": "plain"}, "head_norm='plain': a headwise norm discards the size of each row"),
            ({"to": "diff+dex"}, "--to 'diff+dex' is unknown; choose one of softmax, diff"),
            ({"to": "softmax+wide"}, "or softmax+TYPE with one of them"),
            ({"to": "diff", "lambda_init": 0.5}, "lambda_init=0.5: the model would not keep its function"),
            ({"to": "diff", "lambda_value": 0.5}, "lambda_value=0.5: the model would not keep its function"),
            ({"to": "diff_v2", "head_scale": 0.5}, "head_scale=0.5: the model would not keep its function"),
            ({"to": "grouped_diff_v2", "lambda_init": 0.8}, "lambda_init=0.8: the model would not keep its function"),
            (
                {"to": "softmax", "softmax_head_norm": "gain"},
                "softmax_head_norm='gain': the model would not keep its function; leave it out, which means 'none'",
            ),
            (
                {"to": "softmax", "softmax_head_scale": 2.0},
                "softmax_head_scale=2.0: the model would not keep its function",
            ),
            ({"to": "diff", "dex_heads": [[0]] * 3}, "dex_heads is not an option of --to 'diff'"),
            ({"to": "dex", "dex_heads": [[0]] * 2}, "for each of the 3 layers"),
            ({"to": "dex", "dex_heads": [[0], [1], [0, 1]]}, "equally long"),
            ({"to": "dex", "dex_heads": [[0], [1], [4]]}, "name heads from 0 to 3"),
        ],
    )
    def test_options(self, options, words, tmp_path):
        saved(tmp_path / "source")
        assert words in refusal(tmp_path, ConfigError, **options)

    def test_tensors(self, tmp_path):
        """By the same road as other conversions, whose refusals `test_convert_refusals.py` has."""
        saved(tmp_path / "source")
        name = "model.layers.1.self_attn.k_proj.weight"
        refusals.edit_weights(tmp_path / "source", lambda weights: weights.pop(name))
        assert "layers.1.self_attn.k_proj.weight is missing" in refusal(tmp_path, CheckpointError)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("nowhere", "no such folder; name a folder, a .gguf file, owner/name on the hub, or a shipped model"),
            ("/nowhere/at/all", "no such folder"),
            ("model.bin", "is a file; name a folder"),
        ],
    )
    def test_sources(self, name, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(CheckpointError, match=words), source_folder(name):
            pass

    def test_a_hub_out_of_reach(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with (
            pytest.raises(CheckpointError, match="owner/model: no such folder, and it was not found on the hub"),
            source_folder("owner/model"),
        ):
            pass


def test_the_conversion_alone():
    """What a conversion needs and makes is known without any weights."""
    conversion = from_llama(LlamaConfig(**BASE, num_attention_heads=3, tie_word_embeddings=True), to="diff")
    assert conversion.needs["model.layers.0.self_attn.q_proj.weight"] == (48, 48)
    assert "model.layers.2.self_attn.lambda_k2" in conversion.makes
    assert "lm_head.weight" not in conversion.makes
