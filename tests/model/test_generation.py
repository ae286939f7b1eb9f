"""Caches and generation: every attention type, every mode of `generate` and every way to a token give the same token."""

import functools
import itertools
import string

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import CompileConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from difftransformer.attention import VARIANTS, base, head_norm
from difftransformer.ops import attention
from tests.support import independent_model
from tests.support.generation import WAYS, cache_of, greedy, tiny
from tests.support.independent_model import causal
from tests.support.oracle import relative_error
from tests.support.tiny_models import VOCABULARY, shape_of, tokens

IMPLEMENTATIONS = ("difftransformer", "eager", "sdpa")
TYPES = ("diff", "diff_v2", "grouped_diff", "softmax")
FIELDS = {
    f"{kind}, {groups} groups": {"attention_type": kind, "num_key_value_heads": groups}
    for kind in VARIANTS
    for groups in (4, 2)
}
FIELDS["own value"] = {"num_differential_heads": 4, "num_differential_key_value_heads": 2, "value_head_dim": 6}
# One of each attention type, and the layer that copies keys for its heads.
MODELS = [*(name for name in FIELDS if name.endswith("2 groups")), "grouped_diff, 4 groups"]
models = pytest.mark.parametrize("name", MODELS)
# Caches differ: one key, two, one that both maps share, keys that are copied for heads, values of which a token's own is read.
KEPT = ("softmax, 2 groups", "diff, 2 groups", "diff_v2, 2 groups", "grouped_diff, 4 groups", "xsa, 2 groups")
kept_models = pytest.mark.parametrize("name", KEPT)
with_windows = pytest.mark.parametrize(
    ("name", "window"), [*((name, None) for name in KEPT), *((name, 4) for name in KEPT[1::2])]
)
TOLERANCE = 1e-5
NEW = 8


def expected_logits(model, ids, **kwargs):
    weights = model.state_dict()
    return torch.stack([independent_model.run(weights, shape_of(model.config), row, **kwargs)[0] for row in ids])


def independent_greedy(model, row, new, window=None):
    """Greedy tokens of the independent model, which has no cache."""
    for end in range(len(row), len(row) + new):
        last = expected_logits(model, row[None], allowed=causal(end, window))[0, -1]
        row = torch.cat((row, last.argmax()[None]))
    return row[-new:]


def padded():
    """Three rows of 9, 5 and 1 tokens, padded on the left, and their mask."""
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, :8] = 0
    return ids, mask


@functools.cache
def greedy_alone(name, window=None):
    """The greedy tokens of each row of `padded` alone, by the equations."""
    model, (ids, mask) = tiny(**FIELDS[name], sliding_window=window), padded()
    alone = [independent_greedy(model, row[kept], NEW, window) for row, kept in zip(ids, mask.bool(), strict=True)]
    expected = torch.stack(alone)
    assert expected.unique().numel() > 3
    return expected


class TestGreedy:
    @pytest.mark.parametrize(
        ("name", "window"),
        [
            *((name, None) for name in (*MODELS, "diff, 4 groups", "softmax, 4 groups", "own value")),
            *((name, 4) for name in (*KEPT, "grouped_diff_v2, 2 groups")),
            ("diff, 2 groups", 1),
        ],
    )
    def test_padded_batches(self, name, window):
        """The longest prompt is longer than the window, the shortest shorter, and what follows is longer than both."""
        model, (ids, mask) = tiny(**FIELDS[name], sliding_window=window), padded()
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, attention_mask=mask, **way), greedy_alone(name, window))

    @pytest.mark.parametrize("kind", TYPES)
    def test_implementations(self, kind):
        name = f"{kind}, 4 groups"
        model, (ids, mask) = tiny(**FIELDS[name]), padded()
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            for way in WAYS.values():
                assert torch.equal(greedy(model, ids, 4, attention_mask=mask, **way), greedy_alone(name)[:, :4])

    @pytest.mark.parametrize("kind", TYPES)
    def test_mask_with_holes(self, kind):
        model, ids = tiny(attention_type=kind), tokens(2, 9)
        mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1]])
        rows = [ids[row][mask[row].bool()] for row in range(2)]
        expected = torch.stack([independent_greedy(model, row, 8) for row in rows])
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, attention_mask=mask, **way), expected)

    def test_beyond_the_chunked_backends_block(self):
        model, ids = tiny(), tokens(1, 120)
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        expected = independent_greedy(model, ids[0, 30:], 4)[None]
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, 4, attention_mask=mask, **way), expected)

    @with_windows
    def test_chunked_prefill(self, name, window):
        model, (ids, mask) = tiny(**FIELDS[name], sliding_window=window), padded()
        for way in ("dynamic", "static"):
            out = greedy(model, ids, NEW, attention_mask=mask, prefill_chunk_size=4, **WAYS[way])
            assert torch.equal(out, greedy_alone(name, window)), way

    @kept_models
    def test_a_dialogue_goes_on_from_its_cache(self, name):
        """The second call gets the first one's cache and the longer row."""
        model, ids = tiny(**FIELDS[name]), tokens(1, 6)
        arguments = {"do_sample": False, "return_dict_in_generate": True}
        first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **arguments)
        longer = torch.cat((first.sequences, tokens(1, 3, seed=5)), 1)
        mask = torch.ones_like(longer)
        out = greedy(model, longer, 5, attention_mask=mask, past_key_values=first.past_key_values)
        assert torch.equal(out, greedy(model, longer, 5, attention_mask=mask, use_cache=False))


class TestSearch:
    @with_windows
    def test_beams(self, name, window):
        model, (ids, mask) = tiny(**FIELDS[name], sliding_window=window), padded()

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

    @kept_models
    def test_sampling_does_not_depend_on_the_cache(self, name):
        model, (ids, mask), draws = tiny(**FIELDS[name]), padded(), []
        for way in WAYS.values():
            torch.manual_seed(3)
            arguments = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "max_new_tokens": NEW}
            draws.append(model.generate(ids, attention_mask=mask, **arguments, **way)[:, ids.shape[1] :])
        assert all(torch.equal(draw, draws[0]) for draw in draws)
        assert not torch.equal(draws[0], greedy_alone(name))

    @with_windows
    def test_assisted(self, name, window):
        """By a small model of its own kind, or by n-grams of the prompt; refused tokens are taken out of the cache again."""
        model, ids = tiny(**FIELDS[name], sliding_window=window), tokens(1, 4).repeat(1, 3)
        mask = torch.ones_like(ids)
        assistant = tiny(**FIELDS[name], seed=3, num_hidden_layers=1)
        expected = greedy(model, ids, attention_mask=mask, use_cache=False)
        for how in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(greedy(model, ids, attention_mask=mask, **how), expected), how

    @kept_models
    def test_assisted_by_its_own_first_layer(self, name):
        """Drafts leave out the last layer: it runs less often than the first, and tokens are the same."""
        model, ids = tiny(**FIELDS[name]), tokens(1, 4).repeat(1, 3)
        mask, runs = torch.ones_like(ids), []
        for layer in (model.model.layers[0], model.model.layers[-1]):
            layer.register_forward_hook(lambda layer, *_: runs.append(layer))
        expected = greedy(model, ids, attention_mask=mask)
        runs.clear()
        assert torch.equal(greedy(model, ids, attention_mask=mask, assistant_early_exit=1), expected)
        assert 0 < runs.count(model.model.layers[-1]) < runs.count(model.model.layers[0])
        assert model.config.num_hidden_layers == len(model.model.layers)


class TestCaches:
    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("window", [None, 4])
    def test_chunked_prefill(self, kind, window):
        """Several tokens against a cache that holds some: the same as the whole row at once."""
        model, ids = tiny(attention_type=kind, sliding_window=window), tokens(2, 14)
        expected = expected_logits(model, ids, allowed=causal(14, window))
        for implementation, cache_kind in itertools.product(IMPLEMENTATIONS, ("dynamic", "static")):
            model.set_attn_implementation(implementation)
            cache = cache_of(cache_kind, model, 17)
            with torch.no_grad():
                parts = [model(part, past_key_values=cache).logits for part in ids.split((5, 1, 2, 6), 1)]
            assert relative_error(torch.cat(parts, 1), expected) < TOLERANCE, (implementation, cache_kind)
            assert int(cache.get_seq_length()) == 14

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("with_positions", [False, True])
    def test_chunked_prefill_with_padding_and_holes(self, kind, window, with_positions):
        """With the mask as wide as the tokens so far, or as the whole cache already."""
        model, ids = tiny(attention_type=kind, sliding_window=window), tokens(2, 14)
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[0, :3] = 0
        if window is None or not with_positions:  # a window counts holes, so rows alone would be no reference
            mask[1, 2] = mask[1, 6:8] = 0
        real, positions, expected = mask.bool(), (mask.cumsum(1) - 1).clamp_min(0), []
        for row, kept in zip(ids, real, strict=True):
            if with_positions:
                allowed = causal(int(kept.sum()), window)
                expected.append(expected_logits(model, row[kept][None], allowed=allowed)[0])
            else:
                expected.append(expected_logits(model, row[None], allowed=causal(14, window) & kept)[0, kept])
        for cache_kind, widened in (("dynamic", False), ("static", False), ("static", True)):
            cache, parts, at = cache_of(cache_kind, model, 17), [], 0
            for part in ids.split((5, 1, 2, 6), 1):
                end = at + part.shape[1]
                given = mask if widened else mask[:, :end]
                more = {"position_ids": positions[:, at:end]} if with_positions else {}
                with torch.no_grad():
                    parts.append(model(part, past_key_values=cache, attention_mask=given, **more).logits)
                at = end
            for row, found in enumerate(torch.cat(parts, 1)):
                assert relative_error(found[real[row]], expected[row]) < TOLERANCE, (cache_kind, widened)

    @pytest.mark.parametrize("kind", TYPES)
    @torch.no_grad()
    def test_packed_documents_into_a_cache(self, kind):
        model, ids = tiny(attention_type=kind), tokens(1, 12)
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        expected = torch.cat([expected_logits(model, part) for part in ids.split((5, 7), 1)], 1)
        for cache_kind in ("dynamic", "static"):
            out = model(ids, position_ids=positions, past_key_values=cache_of(cache_kind, model, 17)).logits
            assert relative_error(out, expected) < TOLERANCE, cache_kind

    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    @pytest.mark.parametrize("window", [None, 3])
    def test_packed_documents_beside_a_past(self, cache_kind, window):
        """The cached tokens go on into the first new document, and the second sees neither."""
        model, ids = tiny(sliding_window=window), tokens(1, 12)
        cache = cache_of(cache_kind, model, 17)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            positions = torch.tensor([[4, 5, 6, 0, 1, 2, 3, 4]])
            out = model(ids[:, 4:], position_ids=positions, past_key_values=cache).logits
        first = expected_logits(model, ids[:, :7], allowed=causal(7, window))[:, 4:]
        second = expected_logits(model, ids[:, 7:], allowed=causal(5, window))
        assert relative_error(out, torch.cat((first, second), 1)) < TOLERANCE

    def test_cache_is_made_only_where_it_is_used(self):
        model, ids = tiny(), tokens(1, 4)
        assert model(ids).past_key_values.get_seq_length() == 4
        assert model(ids, use_cache=False).past_key_values is None
        assert model.train()(ids).past_key_values is None


class TestStopping:
    def test_stop_strings(self):
        """The row ends with the string's last token; a token is a letter or a digit."""
        letters = (string.ascii_letters + string.digits)[:VOCABULARY]
        characters = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
        characters.decoder = Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
        model, ids = tiny(), tokens(1, 5)
        arguments = {"attention_mask": torch.ones_like(ids), "use_cache": True}
        whole = greedy(model, ids, **arguments)[0]
        stop = letters[whole[2]] + letters[whole[3]]
        out = greedy(model, ids, stop_strings=[stop], tokenizer=tokenizer, **arguments)[0]
        end = next(at for at in range(1, NEW) if torch.equal(whole[at - 1 : at + 1], whole[2:4])) + 1
        assert torch.equal(out, whole[:end])

    def test_streamer_gets_what_is_returned(self):
        class Kept(BaseStreamer):
            def __init__(self):
                self.ids, self.ended = [], False

            def put(self, value):
                self.ids += value.flatten().tolist()

            def end(self):
                self.ended = True

        model, kept, ids = tiny(), Kept(), tokens(1, 5)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, streamer=kept)
        assert kept.ids == out[0].tolist()
        assert kept.ended

    @pytest.mark.parametrize("name", ["diff, 4 groups", "softmax, 4 groups"])
    def test_end_of_text_stops_a_row_alone(self, name):
        model, (ids, mask), expected = tiny(**FIELDS[name]), padded(), greedy_alone(name)
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
    def test_reads_the_cache_itself_once_a_layer(self, name, cache_kind, monkeypatch):
        """One call of the op for each layer, with the cache's own tensors: no copy, and no key or value for every head."""
        calls = []
        op = attention.attend
        for module in (base, head_norm):
            monkeypatch.setattr(module, "attend", lambda *args, **options: calls.append(args) or op(*args, **options))
        model = tiny(**FIELDS[name])
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
    def test_compiled_as_one_graph(self, name):
        model = tiny(**FIELDS[name])
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        out, expected = decoded(model, cache_of("static", model, 12), 3, compiled)
        assert relative_error(out, expected) < 1e-5

    @pytest.mark.slow
    def test_generate_compiled(self):
        """`generate` compiles the step of a static cache where it is told to, the CPU included."""
        name = "diff, 4 groups"
        model, (ids, mask) = tiny(**FIELDS[name]), padded()
        torch._dynamo.reset()
        options = CompileConfig(fullgraph=True, backend="aot_eager")
        options._compile_all_devices = True
        out = greedy(model, ids, NEW, attention_mask=mask, cache_implementation="static", compile_config=options)
        assert torch.equal(out, greedy_alone(name))
