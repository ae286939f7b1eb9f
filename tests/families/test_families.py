"""Tiny random models of transformers' own classes, every option away from its default, made differential."""

import copy
import inspect
import pickle
import re
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)
from transformers.configuration_utils import get_head_shapes
from transformers.masking_utils import eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from difftransformer.attention import Attention
from difftransformer.errors import CheckpointError, ConfigError, ShapeError
from difftransformer.families import FAMILIES, REFUSED, DifferentialFields, count_family, family_config, upcycle_folder
from difftransformer.families.llama import targets
from tests.model.test_hooks import offload
from tests.support import fresh
from tests.support.generation import check_quantized_cache
from tests.support.oracle import relative_error

BASE = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
BIASES = {"attention_bias": True, "mlp_bias": True}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 6, "mamba_n_groups": 1, "mamba_chunk_size": 4}
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
    "gemma3_text": {
        **MIXED, "query_pre_attn_scalar": 5, "head_dim": 10, "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "olmo2": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "olmo3": {**MIXED, "attention_bias": True},
    "smollm3": {**MIXED, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "attention_bias": True},
    "apertus": {"attention_bias": True, "tie_word_embeddings": True},
    "arcee": {**BIASES, "head_dim": 10, "tie_word_embeddings": True},
    "cohere": {"attention_bias": True, "use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {**MIXED, "attention_bias": True, "head_dim": 10, "logit_scale": 0.5},
    "ernie4_5": {"use_bias": True, "head_dim": 10, "tie_word_embeddings": False},
    "exaone4": {**MIXED, "head_dim": 10, "tie_word_embeddings": True},
    "gemma": {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": False},
    "glm": {"head_dim": 12, "attention_bias": True, "rope_parameters": PARTIAL, "tie_word_embeddings": True},
    "glm4": {"head_dim": 12, "attention_bias": True, "rope_parameters": PARTIAL, "tie_word_embeddings": True},
    "granite": {
        **BIASES, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "tie_word_embeddings": True,
    },
    "helium": {**BIASES, "head_dim": 8, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {"attention_bias": True, "head_dim": 10, "tie_word_embeddings": True},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3], "attention_bias": True, "z_loss_coefficient": 0.3},
    "falcon_h1": {
        **MAMBA, "mamba_d_ssm": 96, "attention_bias": True, "key_multiplier": 0.7, "attention_out_multiplier": 0.8,
        "lm_head_multiplier": 0.6, "head_dim": 10,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-*", "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 6, "n_groups": 1,
        "head_dim": 10, "chunk_size": 4,
    },
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16, "attention_multiplier": 0.2,
    },
    "ministral": {**MIXED, "head_dim": 10, "tie_word_embeddings": True},
    "ministral3": {
        "sliding_window": 5, "head_dim": 10, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "mixtral": {"sliding_window": 5, "num_local_experts": 4, "head_dim": 10, "tie_word_embeddings": True},
    "nemotron": {**BIASES, "head_dim": 12, "rope_parameters": PARTIAL, "tie_word_embeddings": True},
    "olmo": {"attention_bias": True, "clip_qkv": 0.5, "tie_word_embeddings": True},
    "olmoe": {**EXPERTS, "attention_bias": True, "clip_qkv": 0.5, "tie_word_embeddings": True},
    "phi": {"qk_layernorm": True, "rope_parameters": PARTIAL, "tie_word_embeddings": False},
    "qwen2_moe": {
        **QWEN, **EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2, "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **EXPERTS, "use_sliding_window": True, "sliding_window": 5, "head_dim": 10, "attention_bias": True,
        "mlp_only_layers": [1], "tie_word_embeddings": True,
    },
    "seed_oss": {
        **BIASES, "attention_out_bias": True, "head_dim": 10, "attention_dropout": 0.0,
        "residual_dropout": 0.0, "tie_word_embeddings": True,
    },
    "starcoder2": {"use_bias": True, "sliding_window": 5, "tie_word_embeddings": False},
}  # fmt: skip
MIXING = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h")  # other layers see other tokens too
WHOLE_LOGITS = ("bamba", "cohere", "cohere2", "falcon_h1", "gemma2", "granite", "phi")


# One of each kind: projections fused, biased or named otherwise, norms of each form, rotations, scales, experts, other layers.
KINDS = (
    "cohere", "ernie4_5", "exaone4", "falcon_h1", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense", "lfm2", "mistral",
    "mixtral", "nemotron_h", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen3",
)  # fmt: skip


def source_model(family, **changes):
    """A model whose weights are large enough that attention matters."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**BASE | OPTIONS[family] | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = 0.2 * torch.randn_like(parameter)
            parameter.copy_(1 + drawn if "norm" in name else drawn)
    return model


def new_model(family, **changes):
    """A differential model of a family as it starts."""
    torch.manual_seed(3)
    config = family_config(family)(**BASE | {"num_key_value_heads": 2} | OPTIONS[family] | changes)
    return AutoModelForCausalLM.from_config(config)


def in_float64(model):
    """The model, which rounds what its formulas compute in fp32 alone."""
    model.set_experts_implementation("eager")  # there are no grouped products of float64
    return model.double()


def upcycled(model, folder, to):
    """The model's conversion, as AutoModelForCausalLM opens it."""
    model.save_pretrained(folder / "source")
    done = upcycle_folder(folder / "source", folder / to, to=to)
    return AutoModelForCausalLM.from_pretrained(folder / to), done


def ids(length=21, rows=2):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(4))


def test_every_family_is_tried():
    assert set(OPTIONS) == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "to"),
    [
        *((family, "diff") for family in KINDS),
        *(pytest.param(family, "diff", marks=pytest.mark.slow) for family in FAMILIES if family not in KINDS),
        *(pytest.param(family, to, marks=pytest.mark.slow) for family in KINDS for to in targets() if to != "diff"),
    ],
)
def test_same_function_at_the_start(family, to, tmp_path):
    """As near to the source model in float64 as that is in fp32, which gives what padding leaves of a row by itself."""
    stock = source_model(family)
    ours, done = upcycled(stock, tmp_path, to)
    exact = in_float64(copy.deepcopy(stock))
    for start in (0, 6):
        mask = torch.ones_like(ids())
        mask[1, :start] = 0
        expected = (
            exact(ids()[:1]).logits[0],
            exact(ids()[1:, start:], position_ids=torch.arange(start, 21)[None]).logits[0],
        )
        mine, theirs = (
            relative_error(model(ids(), attention_mask=mask).logits[mask.bool()], torch.cat(expected))
            for model in (ours, stock)
        )
        assert mine < max(2 * theirs, 2e-6)
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids(9), **greedy), stock.generate(ids(9), **greedy))
    added = sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in stock.parameters())
    assert done.added_parameters == added
    assert added > 0 or to == "softmax"
    if to == "diff" and family not in MIXING:
        assert_the_subtraction_is_a_subtraction(ours)


def assert_the_subtraction_is_a_subtraction(model):
    """With lambda at 1 and equal maps, attention gives nothing, so that no token sees another one."""
    in_float64(model)  # some normalise what attention gives: its rounding
    for module in model.modules():
        if isinstance(module, Attention):
            module.lambda_value = 1.0
    other = ids()
    other[:, :-1] = other[:, :-1].flip(1)
    assert not torch.equal(other, ids())
    torch.testing.assert_close(model(ids()).logits[:, -1], model(other).logits[:, -1], rtol=0, atol=1e-4)


# A mistral becomes a model of this package.
@pytest.mark.parametrize(
    "family",
    [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "mistral"],
)
def test_trained_saved_and_opened_again(family, tmp_path):
    ours, _ = upcycled(source_model(family), tmp_path, "grouped_diff")
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


def test_a_new_process_knows_the_classes(tmp_path):
    """By a pickle, by their names, and by the folder of a model."""
    ours, _ = upcycled(source_model("qwen3"), tmp_path, "diff_v2")
    torch.save((ours, ids(), ours(ids()).logits), tmp_path / "pickled")
    program = (
        "import sys, torch; model, ids, logits = torch.load(sys.argv[2], weights_only=False); "
        "torch.testing.assert_close(model(ids).logits, logits); "
        "import difftransformer; from difftransformer.families import models as m; "
        "from transformers import AutoModelForCausalLM; "
        "print(m.DifferentialGlm4ForCausalLM.__name__, m.DifferentialGlm4Config.family, "
        "type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    printed = fresh.run(program, tmp_path / "diff_v2", tmp_path / "pickled")
    assert printed.split()[-3:] == ["DifferentialGlm4ForCausalLM", "glm4", "DifferentialQwen3ForCausalLM"]


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_maps_are_returned_and_no_implementation_is_plain(family, tmp_path):
    """Any other attention function would see twice as many heads and say nothing."""
    ours, _ = upcycled(source_model(family), tmp_path, "diff")
    for module in ours.modules():
        if isinstance(module, Attention):
            module.lambda_value = 0.25
    expected = ours(ids()).logits
    ours.config.output_attentions = True
    for implementation in ("difftransformer", "eager"):
        ours.set_attn_implementation(implementation)
        outputs = ours(ids())
        torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-4)
        assert len(outputs.attentions) == 4
        for attention in outputs.attentions:
            torch.testing.assert_close(attention.sum(-1), torch.full((2, 6, 21), 0.75))
    with pytest.raises(ConfigError, match='"flex_attention"` is not supported; leave it out'):
        ours.set_attn_implementation("flex_attention")


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize(
    ("asked", "backend"), [("eager", "reference"), ("sdpa", "sdpa"), ("flash_attention_2", "auto"), (None, "auto")]
)
def test_the_implementation_that_is_asked_for(kind, asked, backend, tmp_path):
    """At the start too, where the configuration gets one name for all."""
    auto = getattr(transformers, kind)
    config = family_config("qwen3")(**BASE | {"num_key_value_heads": 2})
    built = auto.from_config(config, attn_implementation=asked)
    built.save_pretrained(tmp_path)
    for model in (built, auto.from_pretrained(tmp_path, attn_implementation=asked)):
        assert {module.backend for module in model.modules() if isinstance(module, Attention)} == {backend}
        model.set_attn_implementation("difftransformer")
        assert {module.backend for module in model.modules() if isinstance(module, Attention)} == {"auto"}


@torch.no_grad()
@pytest.mark.parametrize("lowest", [True, -torch.inf, torch.finfo(torch.float32).min, -1e9], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_masks_of_the_caller(family, lowest, tmp_path):
    """Bool, or added to the logits as the stock model adds it; biases, which the op does not add, are refused."""
    stock = source_model(family)
    ours, _ = upcycled(stock, tmp_path, "diff")
    allowed = torch.ones(21, 21, dtype=torch.bool).tril().index_fill(1, torch.tensor([4, 9]), False)
    allowed.fill_diagonal_(True)
    mask = allowed if lowest is True else torch.zeros(21, 21).masked_fill(~allowed, lowest)
    found, expected = (model(ids(), attention_mask=mask[None, None]).logits for model in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - ours(ids()).logits).abs().max() > 0.1
    with pytest.raises(ShapeError, match=r"attention_mask of torch\.float32 .* biases cannot be added to the logits"):
        ours(ids(), attention_mask=torch.where(allowed, 0.5, -torch.inf)[None, None])


@pytest.mark.parametrize("to", [to for to in targets() if to != "softmax"])
def test_weights_are_there_only_inside_their_modules_call(to, tmp_path):
    """Hooks of offloading and sharding fetch a module's weights when it is called, and drop them afterwards."""
    ours, _ = upcycled(source_model("olmo2"), tmp_path, to)
    expected = ours(ids()).logits
    assert torch.equal(offload(ours)(ids()).logits, expected)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3"])
def test_counts_are_those_of_the_model(family, tmp_path):
    ours, done = upcycled(source_model(family), tmp_path, "diff")
    counts = count_family(ours.config)
    assert counts.parameters == done.parameters == sum(p.numel() for p in ours.parameters())
    cache = ours(ids(8, rows=1), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    shortest = min(layer.keys.shape[2] for layer in cache.layers)
    assert shortest in (4, 8)  # a window of 5 keeps the 4 keys that the next query can see
    lengths = sum(layer.keys.shape[2] for layer in cache.layers)
    assert counts.kv_bytes_per_token == 2 * held * len(cache.layers) // lengths


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3_text", "exaone4", "qwen2"])
def test_counts_take_the_window_of_each_layer(family):
    """Operations grow with the keys that a query of the original sees, by its maps: 3 heads have two maps and values of 2 D."""
    operations, keys = [], []
    for windows in (0, 1, 4):
        types = {"layer_types": ["sliding_attention"] * windows + ["full_attention"] * (4 - windows)}
        ours, stock = new_model(family, **types), source_model(family, **types)
        operations.append(count_family(ours.config).forward_flops_per_token)
        stock.set_attn_implementation("eager")
        maps = stock(ids(64, rows=1), output_attentions=True).attentions
        keys.append(sum((one[0, 0] > 0).sum().item() for one in maps) / 64)
    assert keys[0] > keys[1] > keys[2]
    width = ours.get_decoder().layers[0].self_attn.head_dim
    for place in (1, 2):
        each = (operations[0] - operations[place]) / (keys[0] - keys[place])
        assert each == pytest.approx(2 * 3 * (2 * width + 2 * width), rel=1e-3)


@torch.no_grad()
def test_operations_of_dex_are_those_that_torch_counts():
    counted = []
    for heads in (None, [[0]] * 4):
        ours = new_model("qwen2", attention_type="dex", dex_heads=heads)
        with FlopCounterMode(display=False) as counter:
            ours(ids(64, rows=1), use_cache=False)
        counted.append(
            (count_family(ours.config, context_tokens=64).forward_flops_per_token, counter.get_total_flops() / 64)
        )
    (ours, torchs), (fewer, torchs_fewer) = counted
    assert ours - fewer == torchs - torchs_fewer > 0


@pytest.mark.parametrize(
    ("family", "options", "text"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, r"soft-capped logits \(attn_logit_softcapping=50.0\)"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        *((family, {}, re.escape(f"cannot be made differential: {why}")) for family, why in REFUSED.items()),
        ("mamba2", {}, "model_type='mamba2' is not supported; expected one of apertus, arcee"),
    ],
)
def test_refused_by_what_it_has(family, options, text, tmp_path):
    (tmp_path / "source").mkdir()
    CONFIG_MAPPING[family](**BASE | options if options else {}).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match=text) as error:
        upcycle_folder(tmp_path / "source", tmp_path / "made", to="diff")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()


def test_tensors_that_a_family_does_not_read_are_left_out(tmp_path):
    """As transformers leaves them out, such as the draft head of a Nemotron-H."""
    plain = source_model("nemotron_h")
    plain.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    save_file(load_file(file) | {"mtp.layers.0.norm.weight": torch.ones(48)}, file, metadata={"format": "pt"})
    done = upcycle_folder(tmp_path / "source", tmp_path / "made", to="diff")
    assert done.converted.notes == (
        "mtp.layers.0.norm.weight is left out: the source's model does not read such tensors",
    )
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    torch.testing.assert_close(made(ids()).logits, plain(ids()).logits, rtol=0, atol=1e-4)
    save_file(load_file(file) | {"other.weight": torch.ones(48)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"other\.weight is not part of this layout"):
        upcycle_folder(tmp_path / "source", tmp_path / "again", to="diff")


def test_heads_of_another_width_than_the_output_projection_are_refused():
    heads = {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 8}
    config = family_config("qwen3")(attention_type="grouped_diff", **BASE | heads)
    with pytest.raises(ConfigError, match=r"attention_type='grouped_diff': its .* output projection reads 80"):
        AutoModelForCausalLM.from_config(config)


def test_wider_mlps_are_for_llamas_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"--to 'softmax\+diff': only a Llama or Mistral without biases"):
        upcycled(source_model("qwen3"), tmp_path, "softmax+diff")
    assert not (tmp_path / "softmax+diff").exists()


MEASURED = """
import sys
from difftransformer.families import upcycle_folder
from tests.support.peak_memory import forget_peak, resident

forget_peak()
before = resident()
upcycle_folder(sys.argv[1], sys.argv[2], to="diff")
print(resident(peak=True) - before)
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
def test_a_new_model_and_its_loss_in_chunks(family):
    """Gains of heads start at one, also where a family's norms multiply by 1 + weight, as Gemma's do, and in a copy.

    The loss is that of whole logits, with its gradient; all logits are computed where they are more than one product. The
    model is in float64, so that what is rounded are the logits alone, to fp32, before both losses.
    """
    model = in_float64(new_model(family))
    gains = [weight for name, weight in copy.deepcopy(model).named_parameters() if name.endswith("head_norm.weight")]
    assert gains
    assert all((gain == 1).all() for gain in gains)
    ids = torch.randint(3, 61, (2, 13))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, -100)
    found = []
    for chunk in (None, 5):
        model.loss_chunk_tokens = chunk
        output = model(input_ids=ids, labels=labels, skip_logits=True)
        assert (output.logits is None) == (chunk is not None and family not in WHOLE_LOGITS)
        model.zero_grad()
        output.loss.backward()
        found.append((output.loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
    for value, expected in zip(*found, strict=True):
        assert relative_error(value, expected) < 1e-6
    assert "labels" in inspect.signature(model.forward).parameters


def test_the_loss_in_chunks_has_the_loss_of_the_router():
    """Where the configuration asks for it, as an argument of the call does."""
    model = new_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    whole = model(ids(), labels=ids())
    assert whole.aux_loss > 0.1
    model.loss_chunk_tokens = 5
    assert torch.equal(model(input_ids=ids(), labels=ids(), skip_logits=True).loss, whole.loss)


def test_the_loss_in_chunks_as_a_tuple():
    model = new_model("qwen3")
    whole = model(input_ids=ids(), labels=ids(), return_dict=False)
    model.loss_chunk_tokens = 5
    (loss,) = model(input_ids=ids(), labels=ids(), skip_logits=True, return_dict=False)
    torch.testing.assert_close(loss, whole[0])


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForCausalLM"])
@pytest.mark.parametrize("to", ["diff", "dex"])
def test_own_weights_that_a_file_lacks_are_drawn(to, kind, tmp_path):
    """The model is opened on the meta device, so what nobody draws is what the memory held."""
    auto = getattr(transformers, kind)
    made = auto.from_config(family_config("qwen3")(attention_type=to, **BASE | {"num_key_value_heads": 2}))
    own = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "dex_lambda", "dex_proj", "head_norm.weight")
    lacking = [name for name in made.state_dict() if name.endswith(own)]
    made.save_pretrained(tmp_path, state_dict={k: v for k, v in made.state_dict().items() if k not in lacking})
    found = dict(auto.from_pretrained(tmp_path).named_parameters())
    for name in lacking:
        if name.endswith(("head_norm.weight", "dex_lambda")):
            assert (found[name] == (0 if "dex" in name else 1)).all(), name
        else:
            scale = found[name].shape[-1] ** -0.5 if "dex" in name else 0.1
            assert 0.3 * scale < found[name].std() < 2 * scale, name
    drawn = [found[name] for name in lacking if name.endswith(("lambda_q1", "dex_proj"))]
    assert len(drawn) == BASE["num_hidden_layers"]
    assert not torch.equal(drawn[0], drawn[1])


@torch.no_grad()
def test_what_transformers_knows_of_a_family():
    """Trainer shifts the labels that it smooths by a table of names, and TRL looks a class up in `transformers`."""
    kind = type(AutoModelForCausalLM.from_config(family_config("qwen3")(attention_type="dex", **BASE)))
    assert kind.__name__ == "DifferentialQwen3ForCausalLM"
    assert kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert getattr(transformers, kind.__name__) is kind


def test_classes_are_pickled():
    config = family_config("olmo2")(attention_type="dex", **BASE)
    made = type(AutoModelForCausalLM.from_config(config))
    for one in (config, made):
        again = pickle.loads(pickle.dumps(one))
        assert again is made or again.to_dict() == config.to_dict()
    for family, to in (("olmo2", "dex"), ("phi3", "diff")):
        model = new_model(family, attention_type=to).eval()
        again = pickle.loads(pickle.dumps(model))
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(again(ids()).logits, model(ids()).logits)


@torch.no_grad()
@pytest.mark.parametrize("to", ["diff", "dex", "diff_v2"])
def test_a_static_cache_allocated_from_the_configuration(to):
    """As ExecuTorch's modules allocate it, before the first forward pass."""
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    ours = AutoModelForCausalLM.from_config(family_config("qwen3")(attention_type=to, **BASE | heads)).eval()
    cache = StaticCache(ours.config, max_cache_len=32)
    cache.early_initialization(2, *get_head_shapes(ours.config), dtype=torch.float32, device="cpu")
    torch.testing.assert_close(ours(ids(), past_key_values=cache).logits, ours(ids()).logits)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_other_heads(kind, tmp_path):
    """They compute what the original's head does, and are saved and opened again."""
    stock = source_model("qwen3")
    ours, _ = upcycled(stock, tmp_path, "diff")
    opens = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    made, theirs = (opens(tmp_path / name, num_labels=3).eval() for name in ("diff", "source"))
    assert sum(isinstance(module, Attention) for module in made.modules()) == 4
    for model, source in ((made, ours), (theirs, stock)):
        # which transformers does, but for question answering
        model.base_model.load_state_dict(source.model.state_dict())
    for name, module in theirs.named_children():
        if isinstance(module, torch.nn.Linear):
            getattr(made, name).load_state_dict(module.state_dict())
    for mine, wanted in zip(made(ids()).to_tuple(), theirs(ids()).to_tuple(), strict=False):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-4)
    made.save_pretrained(tmp_path / "head")
    assert torch.equal(opens(tmp_path / "head")(ids())[0], made(ids())[0])
    assert f"AutoModelFor{kind}" in (tmp_path / "head" / "README.md").read_text(encoding="utf-8")


def test_the_card(tmp_path):
    """Its code opens the model, its figures are those of the model, and a card that was edited stays."""
    ours, done = upcycled(source_model("mixtral"), tmp_path, "diff_v2")
    ours.save_pretrained(tmp_path / "made")
    card = (tmp_path / "made" / "README.md").read_text(encoding="utf-8")
    assert f"| parameters | {done.parameters:,} |" in card
    assert "| family | `mixtral`: all but attention is the original's |" in card
    code = card.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path / "made"))
    names = {}
    exec(code, names)
    assert torch.equal(names["model"](ids()).logits, ours(ids()).logits)
    (tmp_path / "made" / "README.md").write_text("mine")
    ours.save_pretrained(tmp_path / "made")
    assert (tmp_path / "made" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("family", "to"),
    [
        ("qwen3", "diff"),
        *(
            pytest.param(family, to, marks=pytest.mark.slow)
            for family, to in (("gemma3_text", "diff"), ("phi3", "grouped_diff"), ("mixtral", "diff_v2"))
        ),
    ],
)
def test_continuous_batching(family, to, tmp_path):
    """Of prompts of several lengths, in pages of 4 tokens and passes of 16, against each prompt alone."""
    ours, _ = upcycled(source_model(family), tmp_path, to)
    prompts = [list(range(3, 3 + length)) for length in (5, 9, 17, 2)]
    greedy = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    outputs = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(eos_token_id=-1, **greedy),
        continuous_batching_config=ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16),
    )
    alone = [ours.generate(torch.tensor([prompt]), eos_token_id=None, **greedy)[0] for prompt in prompts]
    expected = [row[len(prompt) :].tolist() for row, prompt in zip(alone, prompts, strict=True)]
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert ours.config._attn_implementation == "difftransformer_family"


@pytest.mark.parametrize("to", ["diff", "grouped_diff", "diff_v2"])
@torch.no_grad()
def test_static_caches_and_whole_graphs(to, tmp_path):
    ours, _ = upcycled(source_model("qwen3", num_hidden_layers=2, max_window_layers=1), tmp_path, to)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = ours.generate(ids(), **greedy)
    assert torch.equal(ours.generate(ids(), cache_implementation="static", disable_compile=True, **greedy), expected)
    if to == "diff":
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids()).logits, ours(ids()).logits)


@pytest.mark.parametrize("to", ["diff", "grouped_diff", "diff_v2"])
def test_quantized_caches(to, tmp_path, monkeypatch):
    """Of a family without windows, which transformers' quantized cache refuses."""
    ours, _ = upcycled(source_model("olmo2"), tmp_path, to)
    check_quantized_cache(ours, ids(), monkeypatch)


def exclusive(module, query, key, value, mask, scaling, **_):
    """XSA in plain PyTorch where there is no cache, with the signature of transformers' attention functions."""
    key, own = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    heads = torch.softmax(query @ key.mT * scaling + mask, -1) @ own
    heads = heads - (heads * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own
    return heads.transpose(1, 2), None


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3"])
def test_exclusive_self_attention(family, monkeypatch):
    """A token's own value, also where the cache holds others: against the stock model without a cache."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "exclusive", exclusive)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "exclusive", eager_mask)
    stock, ours = source_model(family), new_model(family, attention_type="xsa", num_key_value_heads=3)
    ours.eval().load_state_dict(stock.state_dict())
    plain = stock(ids()).logits
    stock.set_attn_implementation("exclusive")
    expected = stock(ids(), use_cache=False).logits
    assert relative_error(plain, expected) > 0.01
    padded = torch.ones_like(ids())
    padded[1, :6] = 0
    for mask in (None, padded):
        found = ours(ids(), attention_mask=mask).logits
        wanted = stock(ids(), attention_mask=mask, use_cache=False).logits
        real = ... if mask is None else mask.bool()
        assert relative_error(found[real], wanted[real]) < 1e-5
    ours.set_attn_implementation("eager")
    assert relative_error(ours(ids()).logits, expected) < 1e-5
    ours.set_attn_implementation("difftransformer")
    for cache in (DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=32)):
        parts = [ours(part, past_key_values=cache).logits for part in ids().split((9, 1, 11), 1)]
        assert relative_error(torch.cat(parts, 1), expected) < 1e-5
    if family != "qwen3":
        return
    greedy = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    prompts = [list(range(3, 3 + length)) for length in (9, 4)]
    outputs = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(eos_token_id=-1, **greedy),
        continuous_batching_config=ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16),
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        row = torch.tensor([prompt])
        for token in output.generated_tokens:
            assert token == stock(row, use_cache=False).logits[0, -1].argmax()
            row = torch.cat((row, torch.tensor([[token]])), 1)


def test_gated_weights_are_trained_and_saved(tmp_path):
    ours, _ = upcycled(source_model("qwen3"), tmp_path, "diff_gate")
    ours.train()(ids(), labels=ids()).loss.backward()
    gates = {name: p for name, p in ours.named_parameters() if "self_attn.differential.gate_proj" in name}
    assert len(gates) == 4
    assert all(gate.grad.abs().max() > 0 for gate in gates.values())
    plan = ours.config.base_model_tp_plan
    assert plan["layers.*.self_attn.differential.gate_proj"] == "colwise"
