"""How parameters start: their distributions, and what their values depend on and do not."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from difftransformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    DiffTransformerModel,
)
from difftransformer.attention import VARIANTS
from tests.support.tiny_models import tiny, tokens

STARTS = ("fan_in", "normal")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def model(initialization="fan_in", seed=0, kind=DiffTransformerForCausalLM, **fields):
    torch.manual_seed(seed)
    return kind(DiffTransformerConfig(**SIZES | {"initialization": initialization} | fields))


def values(network):
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def expected_distribution(name, tensor, initialization, width=96):
    """scipy's distribution of a matrix or of lambda vectors, or the one value of all numbers."""
    if "norm" in name:
        return 1.0
    if name.endswith("dex_lambda"):
        return 0.0
    if name.endswith("dex_proj"):
        return stats.norm(0, tensor.shape[-1] ** -0.5)
    if "lambda_" in name and "lambda_proj" not in name:
        return stats.norm(0, 0.1)  # arXiv:2410.05258 and its code
    if initialization == "normal":
        return stats.norm(0, 0.02)
    if "embed_tokens" in name or name == "lm_head.weight":
        return stats.norm(0, width**-0.5)
    bound = 1 / math.sqrt(tensor.shape[1])
    return stats.uniform(-bound, 2 * bound)


@pytest.mark.parametrize("initialization", STARTS)
@pytest.mark.parametrize("kind", VARIANTS)
def test_every_parameter_has_its_distribution(kind, initialization):
    """Kolmogorov-Smirnov, standard deviation to five standard errors, and the bounds of what is uniform."""
    network = model(initialization, attention_type=kind)
    for name, tensor in values(network).items():
        expected = expected_distribution(name, tensor, initialization)
        if isinstance(expected, float):
            assert (tensor == expected).all(), name
            continue
        numbers = tensor.flatten().double().numpy()
        assert stats.kstest(numbers, expected.cdf).pvalue > 1e-5, name
        spread = expected.std() * math.sqrt((expected.stats("k") + 2) / 4 / len(numbers))  # of the sample's deviation
        assert abs(numbers.std() - expected.std()) < 5 * spread, name
        low, high = expected.support()
        assert low <= numbers.min() <= numbers.max() <= high, name


@torch.no_grad()
@pytest.mark.parametrize("width", [96, 384])
def test_the_residual_stream_begins_with_rms_1_at_every_width(width):
    network = model(hidden_size=width, tie_word_embeddings=True)
    first = network(tokens(4, 50), output_hidden_states=True).hidden_states[0]
    assert first.square().mean().sqrt().item() == pytest.approx(1, abs=0.03)
    assert network.config.embedding_multiplier == pytest.approx(width**0.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("initialization", STARTS)
def test_the_padding_tokens_row_is_zero(initialization, tied):
    network = model(initialization, pad_token_id=5, tie_word_embeddings=tied)
    embedding = network.model.embed_tokens.weight
    assert not embedding[5].any()
    assert embedding[[4, 6]].any(1).all()
    assert torch.equal(network.lm_head.weight, embedding) == tied
    plain = model(initialization, tie_word_embeddings=tied).model.embed_tokens.weight
    assert torch.equal(embedding[:5], plain[:5])


@pytest.mark.parametrize("initialization", STARTS)
def test_the_seed_decides_and_names_differ(initialization):
    first, again, other = (values(model(initialization, seed)) for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert "norm" in name or not torch.equal(tensor, other[name]), name
    layers = [first[f"model.layers.{layer}.mlp.{part}_proj.weight"] for layer in (0, 1) for part in ("gate", "up")]
    assert all(not torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])


@pytest.mark.parametrize("initialization", STARTS)
def test_attention_types_of_one_seed_share_all_but_attention(initialization):
    twin = values(model(initialization, attention_type="softmax"))
    for kind in VARIANTS:
        found = values(model(initialization, attention_type=kind))
        shared = [name for name in twin if ".self_attn." not in name]
        assert len(shared) == 2 + 2 * 5 + 1
        assert all(torch.equal(found[name], twin[name]) for name in shared), kind
    diff = values(model(initialization, attention_type="diff"))
    for part in "qkvo":  # as large in the twin
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert torch.equal(diff[name], twin[name])


def test_classes_of_one_seed_share_their_trunk():
    trunk = values(model(kind=DiffTransformerModel))
    for kind in (
        DiffTransformerForCausalLM,
        DiffTransformerForSequenceClassification,
        DiffTransformerForTokenClassification,
        DiffTransformerForQuestionAnswering,
    ):
        found = values(model(kind=kind).base_model)
        assert found.keys() == trunk.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in trunk.items()), kind


@pytest.mark.parametrize("initialization", STARTS)
def test_values_do_not_depend_on_what_else_the_model_has(initialization):
    small = values(model(initialization))
    deep = values(model(initialization, num_hidden_layers=5))
    assert all(torch.equal(deep[name], tensor) for name, tensor in small.items())
    tied = values(model(initialization, tie_word_embeddings=True))
    assert all(torch.equal(small[name], tensor) for name, tensor in tied.items())
    wide = values(model(initialization, intermediate_size=64))
    assert all(torch.equal(small[name], tensor) for name, tensor in wide.items() if ".mlp." not in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("initialization", STARTS)
def test_values_do_not_depend_on_the_dtype(initialization, dtype):
    fields = {"mimetic_attention": True, "depth_scaled_residual": True}
    usual = values(model(initialization, **fields))
    torch.set_default_dtype(dtype)
    try:
        other = values(model(initialization, **fields))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in other.items():
        assert tensor.dtype == (torch.float32 if "lambda" in name else dtype)
        expected = usual[name].to(tensor.dtype)
        if dtype == torch.float64 and name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.testing.assert_close(tensor, expected, rtol=2**-23, atol=0)  # divided in another precision
        else:
            assert torch.equal(tensor, expected), name


def test_nothing_is_drawn_on_the_meta_device():
    with torch.device("meta"):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES | {"initialization": "fan_in"}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("initialization", STARTS)
def test_a_missing_head_is_drawn_as_when_built(initialization, tmp_path):
    """The model is opened on the meta device, and only what files lack is drawn."""
    kind = DiffTransformerForSequenceClassification
    trunk = model(initialization, seed=9, kind=DiffTransformerModel)
    trunk.save_pretrained(tmp_path)
    torch.manual_seed(0)
    opened = kind.from_pretrained(tmp_path, num_labels=7)
    built = model(initialization, kind=kind, num_labels=7)
    assert torch.equal(opened.score.weight, built.score.weight)
    found = values(opened.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in values(trunk).items())
    expected = expected_distribution("score.weight", built.score.weight, initialization)
    assert stats.kstest(opened.score.weight.detach().flatten().numpy(), expected.cdf).pvalue > 1e-3


@pytest.mark.parametrize("mimetic", [False, True])
@pytest.mark.parametrize("initialization", STARTS)
def test_depth_scaled_residual(initialization, mimetic):
    """o_proj and down_proj alone are divided by sqrt(2 layers), as in GPT-2."""
    fields = {"num_hidden_layers": 3, "mimetic_attention": mimetic}
    plain = values(model(initialization, **fields))
    for name, tensor in values(model(initialization, depth_scaled_residual=True, **fields)).items():
        if "o_proj" in name or "down_proj" in name:
            torch.testing.assert_close(tensor, plain[name] / 6**0.5)
        else:
            assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2", "softmax"])
def test_small_first_logits(attention_type):
    """The gain of the last norm alone starts at 1 / sqrt(d), and the first loss is that of a guess among all tokens."""
    fields = {"attention_type": attention_type, "hidden_size": 256, "tie_word_embeddings": True}
    plain, small = model("fan_in", **fields), model("fan_in", small_first_logits=True, **fields)
    for name, tensor in values(small).items():
        expected = torch.full_like(tensor, 1 / 16) if name == "model.norm.weight" else values(plain)[name]
        assert torch.equal(tensor, expected), name
    ids = torch.randint(300, (8, 64), generator=torch.Generator().manual_seed(1))
    assert abs(small(ids, labels=ids).loss.item() - math.log(300)) < 0.1
    assert plain(ids, labels=ids).loss.item() > math.log(300) + 2


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"attention_type": "softmax"}], ids=str)
@pytest.mark.parametrize("initialization", STARTS)
def test_mimetic_attention_on_both_starts(initialization, fields):
    """Keys are queries of the first head that reads them, outputs the transposed values; all else starts as without it."""
    plain = values(model(initialization, **fields))
    network = model(initialization, mimetic_attention=True, **fields)
    layout = network.config.head_layout()
    shared = layout.num_heads // layout.num_key_value_heads
    for layer in network.model.layers:
        q, k, v, o = (getattr(layer.self_attn, f"{part}_proj").weight.detach() for part in "qkvo")
        queries = q.unflatten(0, (layout.num_heads, layout.query_width))
        assert torch.equal(k, queries[::shared].flatten(0, 1))
        values_of = v.unflatten(0, (layout.num_key_value_heads, layout.value_head_dim))
        assert torch.equal(o, values_of.repeat_interleave(shared, 0).flatten(0, 1).T)
        for matrix in (q, v):
            assert stats.kstest(matrix.flatten().numpy(), stats.norm(0, 96**-0.5).cdf).pvalue > 1e-4
    ends = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
    for name, tensor in values(network).items():
        if not name.endswith(ends):
            assert torch.equal(tensor, plain[name]), name


NEW_FIELDS = ("embedding_multiplier", "depth_scaled_residual", "mimetic_attention", "small_first_logits")


@torch.no_grad()
@pytest.mark.parametrize("stated", ["normal", "mimetic", None])
def test_folders_of_early_versions_keep_their_function(stated, tmp_path):
    early = tiny(attention_type="diff")
    early.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    for name in (*NEW_FIELDS, "initialization"):
        del document[name]
    document |= {"initialization": stated} if stated else {}
    (tmp_path / "config.json").write_text(json.dumps(document))
    opened = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(opened(tokens(2, 9)).logits, early(tokens(2, 9)).logits)
    assert (opened.config.initialization, opened.config.embedding_multiplier) == ("normal", 1.0)
    assert opened.config.mimetic_attention == (stated == "mimetic")


@pytest.mark.parametrize("fields", [{}, {"initialization": "normal"}], ids=str)
def test_saved_configurations_state_the_start(fields, tmp_path):
    config = DiffTransformerConfig(**SIZES | fields)
    config.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    for name in (*NEW_FIELDS, "initialization", "initializer_range"):
        assert document[name] == getattr(config, name), name


def unilm_outputs(x, depth, heads):
    """Microsoft's attention as it starts, (B, T, M) to (B, T, M), from the equations and PyTorch's own linear layers.

    Rotations are left out of both: they turn queries and keys whose distribution every rotation keeps.
    """
    batch, length, width = x.shape
    head_dim = width // heads // 2
    q, k, v, out = (nn.Linear(width, width, bias=False) for _ in range(4))
    lambdas = [torch.randn(head_dim) * 0.1 for _ in range(4)]
    query, key = (part(x).view(batch, length, 2 * heads, head_dim).transpose(1, 2) for part in (q, k))
    value = v(x).view(batch, length, heads, 2 * head_dim).transpose(1, 2)
    scores = query @ key.transpose(-1, -2) * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    maps = scores.masked_fill(future, -math.inf).softmax(-1).view(batch, heads, 2, length, length)
    init = 0.8 - 0.6 * math.exp(-0.3 * depth)
    lam = (lambdas[0] @ lambdas[1]).exp() - (lambdas[2] @ lambdas[3]).exp() + init
    attended = (maps[:, :, 0] - lam * maps[:, :, 1]) @ value
    attended = F.normalize(attended, dim=-1) * (2 * head_dim) ** 0.5 * (1 - init)
    return out(attended.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.slow
@torch.no_grad()
def test_layers_start_as_microsofts():
    """Mean, rms and quantiles of the output at each depth, to five standard errors over 150 seeds."""
    heads, depths, seeds, width = 2, 4, 150, 64
    levels = torch.tensor([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
    x = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(5))
    still = torch.ones(2, 12, 8), torch.zeros(2, 12, 8)  # no rotation

    def figures(outputs):
        """(depths, figures): mean, rms and the quantiles."""
        flat = torch.stack([out.flatten() for out in outputs])
        rms = flat.square().mean(1).sqrt()
        return torch.cat((torch.stack((flat.mean(1), rms)), flat.quantile(levels, 1))).T

    ours, theirs = [], []
    for seed in range(seeds):
        fields = {"hidden_size": width, "num_attention_heads": 2 * heads, "num_hidden_layers": depths}
        network = model(seed=seed, **fields | {"vocab_size": 8, "intermediate_size": 8})
        ours.append(figures([layer.self_attn(x, position_embeddings=still)[0] for layer in network.model.layers]))
        torch.manual_seed(10_000 + seed)
        theirs.append(figures([unilm_outputs(x, depth, heads) for depth in range(depths)]))
    ours, theirs = torch.stack(ours), torch.stack(theirs)
    difference = ours.mean(0) - theirs.mean(0)
    error = ((ours.var(0) + theirs.var(0)) / seeds).sqrt()
    assert (difference.abs() < 5 * error).all(), difference / error
    assert (error[:, 1] < 0.006 * theirs[:, :, 1].mean(0)).all()  # so a difference of rms by 3% would show
    for depth in range(depths):
        assert stats.ks_2samp(ours[:, depth, 1].numpy(), theirs[:, depth, 1].numpy()).pvalue > 1e-4
