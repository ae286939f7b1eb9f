"""The numbers in the explorer's page are those of the model; the page is small, closed, and says what it leaves out."""

import base64
import html
import json
import re
import zlib

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM, attention_maps
from difftransformer.data import byte_tokenizer
from difftransformer.errors import ConfigError, EvaluationError
from difftransformer.ops import observe_inputs
from difftransformer_lab.cli.main import main
from difftransformer_lab.explorer import DEFAULT_PROMPT, maps
from tests.explorer.conftest import MAKE, TEXT
from tests.support.tiny_folders import saved

IDS = [256, *TEXT.encode()]


def unpacked(page):
    """The models of a page: what is said of each, and its maps, [layer] of (H, maps, T, T)."""
    found = []
    for block in re.findall(r'<script type="text/plain" class="packed">(.*?)</script>', page.html):
        content = zlib.decompress(base64.b85decode(block.replace(",", "<")), -zlib.MAX_WBITS)
        start = 4 + int.from_bytes(content[:4], "little")
        facts, planes = json.loads(content[4:start]), np.frombuffer(content[start:], np.uint8).reshape(2, -1)
        counts = planes[0] + 256 * planes[1].astype(int)
        size = len(facts["tokens"])
        layers = [np.zeros((layer["heads"], layer["maps"], size, size)) for layer in facts["layers"]]
        place = 0
        for row in range(size):
            for layer in layers:
                heads, kinds = layer.shape[:2]
                part = counts[place : place + heads * kinds * (row + 1)]
                layer[:, :, row, : row + 1] = part.reshape(heads, kinds, row + 1)
                place += part.size
        for shape, layer in zip(facts["layers"], layers, strict=True):
            steps = 503 * (1 + np.abs(shape["lambda"] or [[0.0]]))
            layer /= facts["levels"] or np.ceil(np.broadcast_to(steps, (len(layer), size)))[:, None, :, None]
        assert place == counts.size
        found.append((facts, layers))
    return found


def left(facts, layers):
    """A1 - lambda A2 of every head, as the page computes it."""
    for layer, own in zip(facts["layers"], layers, strict=True):
        if layer["maps"] == 1:
            yield own[:, 0]
        else:
            yield own[:, 0] - np.array(layer["lambda"])[..., None] * own[:, 1]


@pytest.mark.parametrize("kind", MAKE)
def test_weights_are_those_of_the_eager_model_in_float64(kind):
    (facts, layers), *more = unpacked(maps(MAKE[kind](), byte_tokenizer(), TEXT))
    assert not more
    model = MAKE[kind]().double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.tensor([IDS]), output_attentions=True).attentions
    for weights, expected in zip(left(facts, layers), own, strict=True):
        np.testing.assert_allclose(weights, expected[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_both_maps_are_those_of_attention_maps(kind):
    inputs = []
    with torch.no_grad(), observe_inputs(lambda pairs, *rest: inputs.append(pairs)):
        MAKE[kind]()(torch.tensor([IDS]))
    ((facts, layers),) = unpacked(maps(MAKE[kind](), byte_tokenizer(), TEXT))
    for own, pairs in zip(layers, inputs, strict=True):
        query, key = (torch.cat([pair[index] for pair in pairs], -1) for index in (0, 1))
        for number, expected in enumerate(attention_maps(query, key, is_causal=True)):
            np.testing.assert_allclose(own[:, number], expected[0], rtol=0, atol=1e-3)
    by_token = [len(layer["lambda"][0]) > 1 for layer in facts["layers"]]
    assert by_token == [kind == "diff_v2"] * 3


def test_a_model_that_the_equations_do_not_describe_gives_its_own_weights():
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4)).eval()
    ((_, layers),) = unpacked(maps(bloom, byte_tokenizer(), TEXT))
    with torch.no_grad():
        own = bloom(torch.tensor([IDS]), output_attentions=True).attentions
    for weights, expected in zip(layers, own, strict=True):
        np.testing.assert_allclose(weights[:, 0], expected[0], rtol=0, atol=1e-3)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(EvaluationError, match="MambaForCausalLM: its attention cannot be seen"):
        maps(mamba, byte_tokenizer(), TEXT)


def test_the_model_is_put_back():
    model = MAKE["diff"]().train()
    before = model.config._attn_implementation
    maps(model, byte_tokenizer(), TEXT)
    assert model.training
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("kind", "sharpness"),
    [
        pytest.param("diff", 1.0, marks=pytest.mark.slow),
        ("diff", 4.0),
        pytest.param("diff_v2", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_page_of_twelve_layers_and_128_tokens_has_at_most_a_megabyte_and_a_half(kind, sharpness):
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes |= {"attention_type": kind, "output_attentions": True, "attn_implementation": "eager"}
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**sizes, intermediate_size=64)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name:
                weight.mul_(sharpness)
    page = maps(model, byte_tokenizer(), TEXT * 9)
    ((facts, layers),) = unpacked(page)
    assert [own.shape for own in layers] == [
        (model.config.num_attention_heads // (2 - (kind == "diff_v2")), 2, 128, 128)
    ] * 12
    with torch.no_grad():
        expected = model(torch.tensor([[256, *(TEXT * 9).encode()][:128]])).attentions
    for weights, eager in zip(left(facts, layers), expected, strict=True):
        np.testing.assert_allclose(weights, eager[0], rtol=0, atol=1e-3)
    assert facts["whole"] == 9 * len(TEXT.encode()) + 1
    assert len(page.html.encode()) <= 1_500_000


def test_the_page_asks_for_nothing_and_holds_no_text_of_the_prompt():
    page = maps(MAKE["diff"](), byte_tokenizer(), TEXT)
    written = re.sub(r'class="packed">[^<]*', "", page.html)
    assert not re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|import\(", written)
    assert "default-src 'none'" in page.html
    assert page.html.count("</script>") == page.html.count("<script") == 2
    assert page.html.isascii()


def test_tokens():
    def tokens(tokenizer, text, **options):
        ((facts, _),) = unpacked(maps(MAKE["llama"](), tokenizer, text, **options))
        return facts["tokens"], facts["whole"], facts["begins"]

    own = byte_tokenizer()
    assert tokens(own, "ab c") == (["<|endoftext|>", "a", "b", " ", "c"], 5, True)
    assert tokens(own, "ab c", tokens=3) == (["<|endoftext|>", "a", "b"], 5, True)
    assert tokens(own, "\u00e9")[0][1:] == ["\ufffd", "\ufffd"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=own.backend, eos_token="<|endoftext|>")
    assert tokens(theirs, "ab c") == tokens(own, "ab c")
    bare = PreTrainedTokenizerFast(tokenizer_object=own.backend)
    assert tokens(bare, "ab") == (["a", "b"], 2, False)
    assert len(tokens(own, "x" * 400, tokens=300)[0]) == 128  # the model's positions


def test_two_models_have_their_own_tokenizers_and_names():
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend)
    page = maps(MAKE["diff"](), byte_tokenizer(), None, (MAKE["llama"](), theirs), names=("ours", "theirs"))
    (first, _), (second, _) = unpacked(page)
    assert (first["name"], first["kind"]) == ("ours", "DIFF Transformer")
    assert (second["name"], second["kind"]) == ("theirs", "LlamaForCausalLM")
    assert first["tokens"][1:] == second["tokens"][: len(first["tokens"]) - 1]
    assert "".join(first["tokens"][1:]) == DEFAULT_PROMPT[:127]


def test_predictions_are_those_of_the_model_and_of_generate():
    model, tokenizer = MAKE["llama"](), byte_tokenizer()
    ((facts, _),) = unpacked(maps(model, tokenizer, "ab c"))
    ids = torch.tensor([[256, *b"ab c"]])
    with torch.no_grad():
        shares = model(ids).logits[0].double().softmax(-1)
    for row, best in zip(shares, facts["next"], strict=True):
        wanted = row.topk(5)
        assert [share for _, share in best] == pytest.approx(wanted.values.tolist(), abs=1e-3)
        assert [token for token, _ in best] == [tokenizer.decode([one]) for one in wanted.indices.tolist()]
    made = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)[0]
    whole = tokenizer.decode(made.tolist())
    assert facts["answer"] == whole[len(tokenizer.decode(ids[0].tolist())) :].split("\n")[0].strip()


def test_the_answer_is_marked():
    model, tokenizer = MAKE["llama"](), byte_tokenizer()
    assert unpacked(maps(model, tokenizer, "a 42 b", answer="42"))[0][0]["mark"] == [3, 4]
    assert unpacked(maps(model, tokenizer, "a 42 b", answer="43"))[0][0]["mark"] is None
    assert unpacked(maps(model, tokenizer, "a 42 b", answer="42", tokens=4))[0][0]["mark"] is None
    assert unpacked(maps(model, tokenizer, "a 42 b"))[0][0]["mark"] is None
    first, last = unpacked(maps(model, tokenizer))[0][0]["mark"]
    assert DEFAULT_PROMPT[first - 1 : last] == "42"


def test_what_cannot_be_shown():
    model, tokenizer = MAKE["diff"](), byte_tokenizer()
    with pytest.raises(ConfigError, match="the prompt has no tokens; give a text"):
        maps(model, tokenizer, "")
    with pytest.raises(ConfigError, match="tokens=1: give 2 to 1024"):
        maps(model, tokenizer, TEXT, tokens=1)
    small = DiffTransformerForCausalLM(DiffTransformerConfig(vocab_size=99, hidden_size=32, num_attention_heads=4))
    with pytest.raises(ConfigError, match="the tokenizer gives token 256, and the model has 99"):
        maps(small, tokenizer, TEXT)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="some attention weights are not finite"):
        maps(model, tokenizer, TEXT)


def test_a_notebook_shows_the_page():
    page = maps(MAKE["diff"](), byte_tokenizer(), TEXT)
    (inside,) = re.fullmatch(r'<iframe srcdoc="([^"]*)" [^>]*></iframe>', page._repr_html_()).groups()
    assert html.unescape(inside) == page.html


def test_command(tmp_path, monkeypatch, capsys, fails):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "ours")
    saved(tmp_path / "twin", "softmax")
    assert main(["maps", "ours", "a text", "--beside", "twin", "--tokens", "5"]) == 0
    path = tmp_path / "evals" / "ours" / "maps.html"
    assert "evals/ours/maps.html: open it in a browser" in capsys.readouterr().out
    text = path.read_text()
    assert text.count('class="packed"') == 2
    for prompt, is_said in (("a text", True), ("a text", False)):  # alone, where the first page had two models
        assert main(["maps", "ours", prompt, "--tokens", "5"]) == 0
        assert ("maps.html: replaces the maps that were there; another --out" in capsys.readouterr().out) == is_said
    assert main(["maps", "ours", "--out", "one"]) == 0
    assert (tmp_path / "one.html").is_file()
    for words, message in (
        (["maps", "ours", ""], "the prompt is empty"),
        (["maps", "ours", "\udcff"], "the prompt: not UTF-8"),
        (["maps", "ours", "a", "--beside", "/none"], "/none: no such folder"),
        (["maps", "ours", "a", "--tokens", "0"], "--tokens 0: give at least 1"),
        (["maps", "ours", "a", "--tokens", "2000"], "tokens=2000: give 2 to 1024"),
    ):
        assert message in fails(*words)
