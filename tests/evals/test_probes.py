"""Seen from inside: any model forms its maps by the equations and is put back; weights are those of independent formulas."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.errors import EvaluationError
from difftransformer.families import accelerate
from difftransformer.ops import logits as op_logits
from difftransformer.ops.reference import observe_logits
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.models.quantized import quantize_last, quantized_linears, quantized_logits
from difftransformer_lab.evals.probes import magnitudes as measuring
from difftransformer_lab.evals.probes.hooks import written_out
from difftransformer_lab.evals.probes.maps import last_row_weights
from difftransformer_lab.results import TaskResult, read_result

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.3}
STOCK = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "sdpa"}
GROUPED = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}
IDS = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))


def ours(attention_type, **fields):
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=attention_type, **SIZES | fields))


MAKE = {
    "softmax": lambda: ours("softmax"),
    "diff": lambda: ours("diff"),
    "diff_v2": lambda: ours("diff_v2"),
    "dex": lambda: ours("dex"),
    "grouped_diff": lambda: ours("grouped_diff", **GROUPED),
    "grouped_diff_v2": lambda: ours("grouped_diff_v2", **GROUPED),
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**STOCK)),
    "accelerated": lambda: accelerate(DiffLlamaForCausalLM(DiffLlamaConfig(**STOCK))),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**STOCK)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**STOCK, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    ),
}


def made(name):
    torch.manual_seed(1)
    return MAKE[name]().eval()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", MAKE)
def test_written_out_computes_the_same_and_is_put_back(name):
    model = made(name)
    before = model.config._attn_implementation, [type(module) for module in model.modules()]
    plain = model(IDS).logits
    calls = []

    def double(scores, allowed):
        calls.append(scores.shape)
        assert allowed is not None
        assert not allowed.triu(1).any()
        return 2 * scores

    with written_out(model) as layers:
        torch.testing.assert_close(model(IDS).logits, plain, rtol=1e-4, atol=1e-4)
        with observe_logits(double):
            assert (model(IDS).logits - plain).abs().max() > 1e-3
    maps = 2 if "diff" in name or name == "accelerated" else 1
    assert len(layers) == 2
    assert len(calls) == 2 * maps
    with pytest.raises(KeyError), written_out(model):
        raise KeyError
    assert (model.config._attn_implementation, [type(module) for module in model.modules()]) == before
    assert torch.equal(model(IDS).logits, plain)


@pytest.mark.parametrize(
    "name", ["softmax", "diff", "diff_v2", "dex", "grouped_diff", "grouped_diff_v2", "llama", "mistral", "gpt2"]
)
def test_last_row_is_that_of_the_models_own_eager_maps(name):
    model = made(name)
    found = last_row_weights(model, IDS)
    model.set_attn_implementation("eager")
    for weights, expected in zip(found, model(IDS, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(weights, expected[:, :, -1], rtol=1e-4, atol=1e-6)
    if name == "mistral":
        assert (found[0][..., :12] == 0).all()
        assert (found[0][..., 12:] > 0).all()


@pytest.mark.parametrize("name", ["diffllama", "accelerated"])
def test_diffllamas_last_row_by_the_formula_in_float64(name):
    """Maps i and H + i of its own 2 H eager ones, and lambda = exp(q1 k1) - exp(q2 k2) + 0.8 - 0.6 exp(-0.3 layer)."""
    found = last_row_weights(made(name), IDS)
    model = made("diffllama").double()
    model.set_attn_implementation("eager")
    maps = model(IDS, output_attentions=True).attentions
    for index, (weights, raw) in enumerate(zip(found, maps, strict=True)):
        layer = model.model.layers[index].self_attn
        lam = torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2)
        lam = lam + 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * index, dtype=torch.float64))
        assert raw.shape[1] == 4
        expected = raw[:, :2, -1] - lam * raw[:, 2:, -1]
        torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-6)


def test_one_token_looks_at_itself():
    assert [row.flatten().tolist() for row in last_row_weights(made("llama"), IDS[:1, :1])] == [[1.0] * 4] * 2


def test_nested_observers():
    """An inner one sees what the outer one made of the logits: weights under rounding are rounded maps' weights."""
    model = made("diff")
    plain = last_row_weights(model, IDS)
    with quantized_logits(model, 3, "row"):
        rounded = last_row_weights(model, IDS)
        assert len({round(value, 5) for value in rounded[1][0, 0].tolist()}) < 20
    assert not torch.allclose(plain[1], rounded[1])
    assert model.config._attn_implementation == "difftransformer"


def test_models_that_cannot_be_seen_from_inside():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(EvaluationError, match=r"BloomForCausalLM: .*0 of 2 layers form their maps .*Llama, Mistral"):
        last_row_weights(bloom, IDS)
    gemma = Gemma2ForCausalLM(Gemma2Config(**STOCK | {"attn_implementation": "eager"})).eval()
    with pytest.raises(EvaluationError, match="Gemma2Attention: attention with softcap"):
        last_row_weights(gemma, IDS)
    assert gemma.config._attn_implementation == "eager"
    llama = made("llama")
    with written_out(llama), pytest.raises(EvaluationError, match=r"mask is torch.float32, a bias"):
        llama(IDS, attention_mask=torch.zeros(2, 1, 20, 20))
    bare = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(EvaluationError, match="Sequential: its layers are in no list"):
        measuring._blocks(bare, bare[0])
    flash = made("diffllama")
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(EvaluationError, match="whose masks only its own kernels can read"), written_out(flash):
        pass


@pytest.mark.parametrize("name", ["diff", "llama"])
@pytest.mark.parametrize(("weights", "expected"), [("int8", (8, None)), ("int4", (4, 32))])
def test_linear_layers_are_rounded_and_put_back(name, weights, expected):
    model = made(name)
    plain, state = model(IDS).logits, {key: value.clone() for key, value in model.state_dict().items()}
    with torch.inference_mode(), quantized_linears(model, weights, "none"):
        rounded = model(IDS).logits
        for key, value in model.state_dict().items():
            is_linear = "_proj.weight" in key
            assert torch.equal(value, quantize_last(state[key], *expected) if is_linear else state[key]), key
    assert (rounded - plain).abs().max() > 1e-3
    assert torch.equal(model(IDS).logits, plain)
    seen = []
    with quantized_linears(model, "none", "int8"):
        handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
        model(IDS)
        handle.remove()
    steps = seen[0] / seen[0].abs().amax(-1, keepdim=True) * 127
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert torch.equal(model(IDS).logits, plain)


def test_a_model_without_linear_layers():
    with pytest.raises(EvaluationError, match="GPT2LMHeadModel: no Linear layer to quantize"):
        quantized_linears(made("gpt2"), "int8", "none").__enter__()


COMMANDS = {
    "allocation": ["--length", "150", "--needles", "1", "--documents", "2", "--depths", "[0.0, 0.5]", "--digits", "3"],
    "outliers": ["--tokens", "128", "--window", "32", "--largest", "12"],
    "quantized": ["--task-options", '{"windows": 2, "window": 40, "text": TEXT}', "--bits", "[16, 4]"],
    "maps": ["--prompt", "ab ab", "--layers", "[1]", "--heads", "[0]"],
}


@pytest.mark.parametrize(
    ("name", "tasks"), [pytest.param("diff", COMMANDS, marks=pytest.mark.slow), ("llama", ["allocation"])]
)
def test_the_commands(name, tasks, tmp_path, monkeypatch, toy_text):
    torch.manual_seed(1)
    sizes = {"vocab_size": 258, "max_position_embeddings": 160, "pad_token_id": 257}
    model = ours("diff", **sizes) if name == "diff" else LlamaForCausalLM(LlamaConfig(**STOCK | sizes))
    model.save_pretrained(tmp_path / name)
    byte_tokenizer().save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    text = str(toy_text / "00.txt")
    for task in tasks:
        words = [word.replace("TEXT", f'"{text}"') for word in COMMANDS[task]]
        if task in ("allocation", "outliers"):
            words += ["--text", text]
        assert main(["eval", task, name, *words]) == 0
        result = read_result(tmp_path / "evals" / name / f"{task}.json", TaskResult)
        assert result.task == task
        assert result.measurements
        assert (tmp_path / "evals" / name / f"{task}.png").stat().st_size > 5000


@pytest.mark.parametrize("at_once", [1, 300, 1 << 22])
@pytest.mark.parametrize("name", MAKE)
def test_magnitudes_are_those_of_the_written_out_logits(name, at_once, monkeypatch):
    monkeypatch.setattr(op_logits, "LOGITS_AT_ONCE", at_once)
    model, found = made(name), []
    before = model.config._attn_implementation, [type(module) for module in model.modules()]

    def keep(scores, allowed):
        found.append((scores, allowed.expand_as(scores)))
        return scores

    with written_out(model) as layers, observe_logits(keep):
        model(IDS)
    maps = len(found) // len(layers)
    distinct = []
    for place, (scores, allowed) in enumerate(found):
        shared = name.startswith("grouped_diff") and place % maps
        scores = scores[:, :1] if shared else scores
        distinct.append(scores[allowed[:, : scores.shape[1]]].abs())
    expected = torch.cat(distinct)
    measured = measuring.magnitudes(model, [IDS[:1], IDS[1:]], 50)["logits"]
    assert sum(measured["counts"]) == len(expected)
    torch.testing.assert_close(torch.tensor(measured["largest"]), expected.topk(50).values, rtol=1e-4, atol=1e-5)
    bins = torch.repeat_interleave(torch.tensor(measured["bins"]), torch.tensor(measured["counts"]))
    values = (bins.int() << 16).view(torch.float32)
    torch.testing.assert_close(values, expected.sort().values, rtol=2**-7, atol=1e-5)
    assert (model.config._attn_implementation, [type(module) for module in model.modules()]) == before
