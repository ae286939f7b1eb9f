"""Tiny random models of transformers' own classes, every option away from its default, made differential."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from difftransformer.attention import Attention
from difftransformer.errors import ConfigError
from difftransformer.families import FAMILIES, DifferentialFields, count_family, family_config, upcycle_folder
from difftransformer.families.llama import targets
from tests.support import fresh
from tests.support.oracle import relative_error

BASE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
OPTIONS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5, "head_dim": 10},
    "qwen2": {**QWEN, "tie_word_embeddings": True},
    "qwen3": {**QWEN, "head_dim": 10, "attention_bias": True},
    "phi3": {
        "sliding_window": 5,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.2], "long_factor": [2.0, 3.0],
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
        },
    },
    "gemma2": {
        "attn_logit_softcapping": None, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 5, "head_dim": 10,
        "sliding_window": 5, "attention_bias": True,
    },
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 5, "head_dim": 10, "attention_bias": True},
    "olmo2": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "olmo3": {**MIXED, "attention_bias": True},
    "smollm3": {**MIXED, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "attention_bias": True},
}  # fmt: skip
REFUSED = {
    "gemma2": ({"attn_logit_softcapping": 50.0}, "soft-capped logits"),
    "gpt_oss": ({"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
    "deepseek_v3": ({"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "qk_rope_head_dim": 4}, "multi-head latent"),
    "gpt2": ({}, "no layers called self_attn"),
    "qwen3_moe": (
        {"num_experts": 2, "moe_intermediate_size": 8},
        "'qwen3_moe' is not supported; expected one of llama",
    ),
}


def source_model(family, **options):
    """A model whose weights are large enough that attention matters."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**BASE | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = 0.2 * torch.randn_like(parameter)
            parameter.copy_(1 + drawn if "norm" in name else drawn)
    return model


def upcycled(model, folder, to):
    """The model's conversion, as AutoModelForCausalLM opens it."""
    model.save_pretrained(folder / "source")
    done = upcycle_folder(folder / "source", folder / to, to=to)
    return AutoModelForCausalLM.from_pretrained(folder / to), done


def ids(length=21, rows=2):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(4))


def test_every_family_is_tried():
    assert set(OPTIONS) == set(FAMILIES)


@pytest.mark.parametrize("to", [to if to == "diff" else pytest.param(to, marks=pytest.mark.slow) for to in targets()])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_function_at_the_start(family, to, tmp_path):
    stock = source_model(family, **OPTIONS[family])
    ours, done = upcycled(stock, tmp_path, to)
    padding = torch.ones_like(ids())
    padding[1, :6] = 0
    for mask in (None, padding):
        mine, theirs = (model(ids(), attention_mask=mask).logits for model in (ours, stock))
        real = slice(None) if mask is None else mask.bool()
        scale = theirs[real].abs().max()
        torch.testing.assert_close(mine[real] / scale, theirs[real] / scale, rtol=0, atol=1e-5)
    mine, theirs = (
        model.generate(ids(9), max_new_tokens=12, do_sample=False, eos_token_id=None) for model in (ours, stock)
    )
    assert mine.tolist() == theirs.tolist()
    added = sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in stock.parameters())
    assert done.added_parameters == added
    assert added > 0 or to == "softmax"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_subtraction_is_a_subtraction(family, tmp_path):
    """With lambda at 1 and equal maps, attention gives nothing, so that no token sees another one."""
    ours, _ = upcycled(source_model(family, **OPTIONS[family]), tmp_path, "diff")
    for module in ours.modules():
        if isinstance(module, Attention):
            module.lambda_value = 1.0
    other = ids()
    other[:, :-1] = other[:, :-1].flip(1)
    assert not torch.equal(other, ids())
    torch.testing.assert_close(ours(ids()).logits[:, -1], ours(other).logits[:, -1], rtol=0, atol=1e-4)


# A mistral becomes a model of this package.
@pytest.mark.parametrize(
    "family",
    [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "mistral"],
)
def test_trained_saved_and_opened_again(family, tmp_path):
    ours, _ = upcycled(source_model(family, **OPTIONS[family]), tmp_path, "grouped_diff")
    assert isinstance(ours.config, DifferentialFields)
    ours.train()
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = ours(ids(), labels=ids()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    still = {name for name, parameter in ours.named_parameters() if torch.equal(before[name], parameter)}
    assert not still
    ours.eval().save_pretrained(tmp_path / "trained")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(opened(ids()).logits, ours(ids()).logits)
    made = opened.generate(ids(9), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert made.shape == (2, 14)


def test_a_new_process_opens_it(tmp_path):
    upcycled(source_model("qwen3", **OPTIONS["qwen3"]), tmp_path, "diff_v2")
    program = (
        "import difftransformer, sys; from transformers import AutoModelForCausalLM; "
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    done = fresh.run(program, tmp_path / "diff_v2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "DifferentialQwen3ForCausalLM"


def test_eager_gives_the_maps_and_no_implementation_is_plain(tmp_path):
    """Any other attention function would see twice as many heads and say nothing."""
    ours, _ = upcycled(source_model("qwen3", **OPTIONS["qwen3"]), tmp_path, "diff")
    expected = ours(ids()).logits
    ours.set_attn_implementation("eager")
    outputs = ours(ids(), output_attentions=True)
    torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-4)
    assert [tuple(attention.shape) for attention in outputs.attentions] == [(2, 6, 21, 21)] * 4
    with pytest.raises(ConfigError, match="attn_implementation='flash_attention_3' is not supported"):
        ours.set_attn_implementation("flash_attention_3")


@pytest.mark.parametrize("to", [to for to in targets() if to != "softmax"])
def test_weights_are_there_only_inside_their_modules_call(to, tmp_path):
    """Hooks of offloading and sharding fetch a module's weights when it is called, and drop them afterwards."""
    ours, _ = upcycled(source_model("olmo2", **OPTIONS["olmo2"]), tmp_path, to)
    expected = ours(ids()).logits
    for module in ours.modules():
        for parameter in module.parameters(recurse=False):
            kept = parameter.detach().clone()

            def fetch(module, *_, parameter=parameter, kept=kept):
                parameter.data.copy_(kept)

            def drop(module, *_, parameter=parameter):
                parameter.data.fill_(torch.nan)

            module.register_forward_pre_hook(fetch)
            module.register_forward_hook(drop)
            drop(module)
    assert torch.equal(ours(ids()).logits, expected)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3"])
def test_counts_are_those_of_the_model(family, tmp_path):
    ours, done = upcycled(source_model(family, **OPTIONS[family]), tmp_path, "diff")
    counts = count_family(ours.config)
    assert counts.parameters == done.parameters == sum(p.numel() for p in ours.parameters())
    cache = ours(ids(8, rows=1), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    shortest = min(layer.keys.shape[2] for layer in cache.layers)
    assert shortest in (4, 8)  # a window of 5 keeps the 4 keys that the next query can see
    lengths = sum(layer.keys.shape[2] for layer in cache.layers)
    assert counts.kv_bytes_per_token == 2 * held * len(cache.layers) // lengths


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_what_it_has(family, tmp_path):
    options, text = REFUSED[family]
    config = CONFIG_MAPPING[family](**BASE | options)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ConfigError, match=text) as error:
        upcycle_folder(tmp_path / "source", tmp_path / "made", to="diff")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()


def test_wider_mlps_are_for_llamas_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"--to 'softmax\+diff': only a Llama or Mistral without biases"):
        upcycled(source_model("qwen3", **OPTIONS["qwen3"]), tmp_path, "softmax+diff")
    assert not (tmp_path / "made").exists()


MEASURED = """
import re, sys, threading, time
from difftransformer.families import upcycle_folder

def test_wider_mlps_are_for_llamas_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"--to 'softmax\\+diff': only a Llama or Mistral without biases"):
        upcycled(source_model("qwen3", **OPTIONS["qwen3"]), tmp_path, "softmax+diff")
    assert not (tmp_path / "made").exists()


def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident())

thread = threading.Thread(target=watch, daemon=True)
thread.start()
upcycle_folder(sys.argv[1], sys.argv[2], to="diff")
done.set()
thread.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_source_in_several_files_is_never_whole_in_memory(tmp_path):
    fields = {"vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    config = CONFIG_MAPPING["llama"](**fields, num_hidden_layers=16, dtype="bfloat16", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source", max_shard_size="100MB")
    sizes = [path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors")]
    assert len(sizes) >= 4
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "source"), str(tmp_path / "made")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 2 * max(sizes)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(made.float()(ids).logits, model.float()(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_in_chunks(family):
    """Equals that of whole logits, with its gradient; gemma2 soft-caps its logits, so it computes all of them."""
    config = family_config(family)(**BASE | {"num_key_value_heads": 2} | OPTIONS[family])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(3, 61, (2, 13))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, -100)
    found = []
    for chunk in (None, 5):
        model.loss_chunk_tokens = chunk
        output = model(input_ids=ids, labels=labels)
        assert (output.logits is None) == (chunk is not None and family != "gemma2")
        model.zero_grad()
        output.loss.backward()
        found.append((output.loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
    for value, expected in zip(*found, strict=True):
        assert relative_error(value, expected) < 1e-6
    assert "labels" in inspect.signature(model.forward).parameters


@torch.no_grad()
def test_what_transformers_knows_of_a_family():
    """Trainer shifts the labels that it smooths by a table of names, and TRL looks a class up in `transformers`."""
    kind = type(AutoModelForCausalLM.from_config(family_config("qwen3")(attention_type="dex", **BASE)))
    assert kind.__name__ == "DifferentialQwen3ForCausalLM"
    assert kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert getattr(transformers, kind.__name__) is kind


@pytest.mark.parametrize("to", ["diff", "grouped_diff", "diff_v2"])
@torch.no_grad()
def test_static_caches_and_whole_graphs(to, tmp_path):
    ours, _ = upcycled(source_model("qwen3", **OPTIONS["qwen3"]), tmp_path, to)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = ours.generate(ids(), **greedy)
    assert torch.equal(ours.generate(ids(), cache_implementation="static", disable_compile=True, **greedy), expected)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids()).logits, ours(ids()).logits)
