"""Every attention type through every mode of `generate`: the tokens are those of each row alone, without a cache."""

import string

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import CompileConfig, PreTrainedTokenizerFast, QuantizedCache
from transformers.generation.streamers import BaseStreamer

from difftransformer.attention import VARIANTS, base, head_norm
from difftransformer.ops import attention
from tests.support.generation import WAYS, cache_of, greedy, tiny
from tests.support.oracle import relative_error
from tests.support.tiny_models import VOCABULARY, tokens

GROUPS = {"MHA": 4, "GQA": 2}
models = pytest.mark.parametrize(
    ("kind", "groups"), [(kind, groups) for kind in VARIANTS for groups in GROUPS.values()]
)
NEW = 8


def build(kind, groups=4, **fields):
    return tiny(attention_type=kind, num_key_value_heads=groups, **fields)


def padded(model, new=NEW):
    """Three rows of 9, 5 and 1 tokens, padded on the left; their mask; the greedy tokens of each alone, without a cache."""
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, :8] = 0
    alone = [
        greedy(model, row[kept][None], new, attention_mask=torch.ones(1, int(kept.sum())), use_cache=False)[0]
        for row, kept in zip(ids, mask.bool(), strict=True)
    ]
    expected = torch.stack(alone)
    assert expected.unique().numel() > 3
    return ids, mask, expected


class TestGreedy:
    @models
    @pytest.mark.parametrize("window", [None, 4])
    def test_padded_batches(self, kind, groups, window):
        """The longest prompt is longer than the window, the shortest shorter, and what follows is longer than both."""
        model = build(kind, groups, sliding_window=window)
        ids, mask, expected = padded(model)
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, NEW, attention_mask=mask, **way), expected)

    @models
    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("way", ["dynamic", "static"])
    def test_chunked_prefill(self, kind, groups, window, way):
        model = build(kind, groups, sliding_window=window)
        ids, mask, expected = padded(model)
        out = greedy(model, ids, NEW, attention_mask=mask, prefill_chunk_size=4, **WAYS[way])
        assert torch.equal(out, expected)

    @models
    def test_a_dialogue_goes_on_from_its_cache(self, kind, groups):
        """The second call gets the first one's cache and the longer row."""
        model = build(kind, groups)
        ids = tokens(1, 6)
        arguments = {"do_sample": False, "return_dict_in_generate": True}
        first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **arguments)
        longer = torch.cat((first.sequences, tokens(1, 3, seed=5)), 1)
        mask = torch.ones_like(longer)
        out = greedy(model, longer, 5, attention_mask=mask, past_key_values=first.past_key_values)
        assert torch.equal(out, greedy(model, longer, 5, attention_mask=mask, use_cache=False))


class TestSearch:
    @models
    @pytest.mark.parametrize("window", [None, 4])
    def test_beams(self, kind, groups, window):
        model = build(kind, groups, sliding_window=window)
        ids, mask, _ = padded(model)

        def beams(rows, kept, **way):
            arguments = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "num_return_sequences": 2}
            out = model.generate(rows, attention_mask=kept, **arguments, **way)
            return out[:, rows.shape[1] :]

        alone = [
            beams(row[kept][None], torch.ones(1, int(kept.sum())), use_cache=False)
            for row, kept in zip(ids, mask.bool(), strict=True)
        ]
        for way in WAYS.values():
            assert torch.equal(beams(ids, mask, **way), torch.cat(alone))

    @models
    def test_sampling_does_not_depend_on_the_cache(self, kind, groups):
        model = build(kind, groups)
        ids, mask, likeliest = padded(model)
        draws = []
        for way in WAYS.values():
            torch.manual_seed(3)
            arguments = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "max_new_tokens": NEW}
            draws.append(model.generate(ids, attention_mask=mask, **arguments, **way)[:, ids.shape[1] :])
        assert all(torch.equal(draw, draws[0]) for draw in draws)
        assert not torch.equal(draws[0], likeliest)

    @models
    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("helper", ["model", "prompt"])
    def test_assisted(self, kind, groups, window, helper):
        """By a small model of its own kind, or by n-grams of the prompt; refused tokens are taken out of the cache again."""
        model = build(kind, groups, sliding_window=window)
        ids = tokens(1, 4).repeat(1, 3)
        mask = torch.ones_like(ids)
        assistant = build(kind, groups, seed=3, num_hidden_layers=1)
        how = {"assistant_model": assistant} if helper == "model" else {"prompt_lookup_num_tokens": 3}
        expected = greedy(model, ids, attention_mask=mask, use_cache=False)
        assert torch.equal(greedy(model, ids, attention_mask=mask, **how), expected)

    @models
    def test_assisted_by_its_own_first_layer(self, kind, groups):
        """Drafts leave out the last layer: it runs less often than the first, and tokens are the same."""
        model = build(kind, groups)
        ids = tokens(1, 4).repeat(1, 3)
        mask, runs = torch.ones_like(ids), []
        for layer in (model.model.layers[0], model.model.layers[-1]):
            layer.register_forward_hook(lambda layer, *_: runs.append(layer))
        expected = greedy(model, ids, attention_mask=mask)
        runs.clear()
        assert torch.equal(greedy(model, ids, attention_mask=mask, assistant_early_exit=1), expected)
        assert 0 < runs.count(model.model.layers[-1]) < runs.count(model.model.layers[0])
        assert model.config.num_hidden_layers == len(model.model.layers)


class TestOtherCaches:
    @pytest.mark.parametrize("kind", VARIANTS)
    def test_an_offloaded_cache_needs_a_gpu(self, kind):
        model = build(kind)
        ids = tokens(1, 5)
        if not torch.cuda.is_available():
            with pytest.raises((RuntimeError, AssertionError, ValueError)):
                greedy(model, ids, 2, attention_mask=torch.ones_like(ids), cache_implementation="offloaded")

    def test_a_quantized_cache_needs_its_package(self):
        model = build("diff")
        with pytest.raises(ImportError, match="quanto"):
            QuantizedCache("quanto", model.config)


class TestStopping:
    @pytest.mark.parametrize("kind", VARIANTS)
    def test_stop_strings(self, kind):
        """The row ends with the string's last token; a token is a letter or a digit."""
        letters = (string.ascii_letters + string.digits)[:VOCABULARY]
        characters = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
        characters.decoder = Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
        model = build(kind)
        ids = tokens(1, 5)
        arguments = {"attention_mask": torch.ones_like(ids), "use_cache": True}
        whole = greedy(model, ids, **arguments)[0]
        stop = letters[whole[2]] + letters[whole[3]]
        out = greedy(model, ids, stop_strings=[stop], tokenizer=tokenizer, **arguments)[0]
        end = next(at for at in range(1, NEW) if torch.equal(whole[at - 1 : at + 1], whole[2:4])) + 1
        assert torch.equal(out, whole[:end])

    @pytest.mark.parametrize("kind", VARIANTS)
    def test_streamer_gets_what_is_returned(self, kind):
        class Kept(BaseStreamer):
            def __init__(self):
                self.ids, self.ended = [], False

            def put(self, value):
                self.ids += value.flatten().tolist()

            def end(self):
                self.ended = True

        model, kept = build(kind), Kept()
        ids = tokens(1, 5)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, streamer=kept)
        assert kept.ids == out[0].tolist()
        assert kept.ended

    @pytest.mark.parametrize("kind", VARIANTS)
    def test_end_of_text_stops_a_row_alone(self, kind):
        model = build(kind)
        ids, mask, expected = padded(model)
        last = expected[0, 3].item()
        for way in WAYS.values():
            out = greedy(model, ids, NEW, attention_mask=mask, eos_token_id=last, **way)
            for row, whole in zip(out, expected, strict=True):
                end = whole.tolist().index(last) + 1 if last in whole else NEW
                assert torch.equal(row[:end], whole[:end])
                assert not row[end:].any()  # padding


@torch.no_grad()
def decoded(model, cache, steps, call):
    """Logits of several single tokens behind a prompt of five."""
    ids = tokens(1, 5 + steps)
    model(ids[:, :5], past_key_values=cache)
    parts = [call(ids[:, at : at + 1], past_key_values=cache).logits for at in range(5, 5 + steps)]
    return torch.cat(parts, 1), model(ids, use_cache=False).logits[:, 5:]


class TestADecodeStep:
    @models
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    def test_reads_the_cache_itself_once_a_layer(self, kind, groups, cache_kind, monkeypatch):
        """One call of the op for each layer, with the cache's own tensors: no copy, and no key or value for every head."""
        calls = []
        op = attention.attend
        for module in (base, head_norm):
            monkeypatch.setattr(module, "attend", lambda *args, **options: calls.append(args) or op(*args, **options))
        model = build(kind, groups)
        cache = cache_of(cache_kind, model, 12)
        with torch.no_grad():
            model(tokens(1, 5), past_key_values=cache)
            calls.clear()
            model(tokens(1, 1), past_key_values=cache)
        assert len(calls) == model.config.num_hidden_layers
        layout = model.config.head_layout()
        if layout.cache_heads != layout.num_key_value_heads:
            pytest.skip("more key/value heads than noise heads: the layer copies them, as its docstring says")
        for (_, key, value, *_rest), layer in zip(calls, cache.layers, strict=True):
            for read, cached in ((key, layer.keys), (value, layer.values)):
                assert read.data_ptr() == cached.data_ptr()
                assert (read.shape, read.stride()) == (cached.shape, cached.stride())
            assert key.shape[1] == layout.num_key_value_heads

    @pytest.mark.slow
    @models
    def test_compiled_as_one_graph(self, kind, groups):
        model = build(kind, groups)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        out, expected = decoded(model, cache_of("static", model, 12), 3, compiled)
        assert relative_error(out, expected) < 1e-5

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", VARIANTS)
    def test_generate_compiled(self, kind):
        """`generate` compiles the step of a static cache where it is told to, the CPU included."""
        model = build(kind)
        ids, mask, expected = padded(model)
        torch._dynamo.reset()
        options = CompileConfig(fullgraph=True, backend="aot_eager")
        options._compile_all_devices = True
        out = greedy(model, ids, NEW, attention_mask=mask, cache_implementation="static", compile_config=options)
        assert torch.equal(out, expected)
