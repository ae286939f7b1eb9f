"""Caches and generation: every way to reach a token gives the same token."""

import pytest
import torch

from tests.support import independent_model
from tests.support.generation import WAYS, cache_of, greedy, tiny
from tests.support.independent_model import causal
from tests.support.oracle import relative_error
from tests.support.tiny_models import shape_of, tokens

IMPLEMENTATIONS = ("difftransformer", "eager", "sdpa")
TYPES = ("diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "softmax")
FIELDS = {
    "diff": {},
    "diff, grouped, own value": {
        "num_differential_heads": 4,
        "num_differential_key_value_heads": 2,
        "value_head_dim": 6,
    },
    "diff_v2": {"attention_type": "diff_v2", "num_key_value_heads": 2},
    "grouped_diff": {"attention_type": "grouped_diff"},
    "grouped_diff_v2": {"attention_type": "grouped_diff_v2"},
    "grouped_diff, one key": {"attention_type": "grouped_diff", "num_key_value_heads": 2},
    "softmax": {"attention_type": "softmax", "num_key_value_heads": 2},
}
TOLERANCE = 1e-5


def expected_logits(model, ids, **kwargs):
    weights = model.state_dict()
    return torch.stack([independent_model.run(weights, shape_of(model.config), row, **kwargs)[0] for row in ids])


def independent_greedy(model, row, new, window=None):
    """Greedy tokens of the independent model, which has no cache."""
    row = row.clone()
    for _ in range(new):
        last = independent_model.run(model.state_dict(), shape_of(model.config), row, allowed=causal(len(row), window))[
            0
        ][-1]
        row = torch.cat((row, last.argmax()[None]))
    return row[-new:]


class TestGreedy:
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("name", FIELDS)
    def test_with_and_without_caches(self, name, implementation):
        model = tiny(implementation=implementation, **FIELDS[name])
        ids = tokens(2, 7)
        mask = torch.ones_like(ids)
        expected = torch.stack([independent_greedy(model, row, 8) for row in ids])
        assert expected.unique().numel() > 3
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, attention_mask=mask, **way), expected)

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("switched", [False, True])
    def test_left_padded_batch_is_each_row_alone(self, kind, implementation, switched):
        if switched:
            model = tiny(attention_type=kind)
            model.set_attn_implementation(implementation)
        else:
            model = tiny(attention_type=kind, implementation=implementation)
        ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
        mask[1, :4] = 0
        mask[2, :8] = 0
        rows = [ids[row][mask[row].bool()] for row in range(3)]
        expected = torch.stack([independent_greedy(model, row, 8) for row in rows])
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, attention_mask=mask, **way), expected)

    def test_flex_attention(self):
        model = tiny(implementation="flex_attention")
        ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
        mask[1, :3] = 0
        rows = [ids[row][mask[row].bool()] for row in range(2)]
        expected = torch.stack([independent_greedy(model, row, 4) for row in rows])
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, 4, attention_mask=mask, **way), expected)

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("way", WAYS)
    def test_mask_with_holes(self, kind, way):
        model = tiny(attention_type=kind)
        ids = tokens(2, 9)
        mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1]])
        rows = [ids[row][mask[row].bool()] for row in range(2)]
        expected = torch.stack([independent_greedy(model, row, 8) for row in rows])
        assert torch.equal(greedy(model, ids, attention_mask=mask, **WAYS[way]), expected)

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("padded", [0, 3])
    @pytest.mark.parametrize("window", [2, 5, 12])
    def test_sliding_window(self, kind, padded, window):
        """The prompt is shorter and longer than the window, and generation crosses it."""
        model = tiny(attention_type=kind, sliding_window=window)
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
        mask[1, :padded] = 0
        rows = [ids[row][mask[row].bool()] for row in range(2)]
        expected = torch.stack([independent_greedy(model, row, 8, window) for row in rows])
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, attention_mask=mask, **way), expected)

    def test_a_window_of_one(self):
        model = tiny(sliding_window=1)
        ids = tokens(1, 5)
        expected = independent_greedy(model, ids[0], 6, 1)[None]
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, 6, attention_mask=torch.ones_like(ids), **way), expected)

    def test_beyond_the_chunked_backends_block(self):
        model = tiny()
        ids = tokens(1, 120)
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        expected = independent_greedy(model, ids[0, 30:], 4)[None]
        for way in WAYS.values():
            assert torch.equal(greedy(model, ids, 4, attention_mask=mask, **way), expected)

    @pytest.mark.parametrize("way", ["dynamic", "static"])
    def test_from_embeddings(self, way):
        model = tiny()
        ids = tokens(1, 6)
        embedded = model.get_input_embeddings()(ids).detach()
        mask = torch.ones_like(ids)
        out = model.generate(
            inputs_embeds=embedded, attention_mask=mask, max_new_tokens=5, do_sample=False, **WAYS[way]
        )
        assert torch.equal(out[0], independent_greedy(model, ids[0], 5))

    def test_chunked_prefill_of_generate(self):
        model = tiny()
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
        mask[1, :4] = 0
        expected = greedy(model, ids, attention_mask=mask, use_cache=False)
        assert torch.equal(greedy(model, ids, attention_mask=mask, prefill_chunk_size=4), expected)


class TestSearch:
    @pytest.mark.parametrize("kind", TYPES)
    def test_beams(self, kind):
        """The best beam is at least as likely as the greedy row (no law: beams can lose it), and caches change nothing."""
        model = tiny(seed=1, attention_type=kind)
        ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
        mask[1, :3] = 0

        def search(**way):
            return model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=6, do_sample=False, **way)

        beams = search()
        assert torch.equal(beams, search(use_cache=False))
        for row in range(2):
            prompt = ids[row][mask[row].bool()]

            def score(new, prompt=prompt):
                logits = independent_model.run(model.state_dict(), shape_of(model.config), torch.cat((prompt, new)))[0]
                nats = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
                return nats[torch.arange(len(new)), new].sum().item()

            assert score(beams[row, 7:]) >= score(independent_greedy(model, prompt, 6)) - 1e-6

    def test_sampling_follows_the_seed(self):
        model = tiny()
        ids = tokens(1, 5)
        arguments = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 12,
            "do_sample": True,
            "temperature": 3.0,
        }
        draws = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            draws.append(model.generate(ids, **arguments))
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    def test_assisted_by_a_twin(self):
        """Speculative decoding rolls the cache back."""
        model, helper = tiny(), tiny(seed=3, attention_type="softmax")
        ids = tokens(1, 6)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, assistant_model=helper, max_new_tokens=8, do_sample=False)
        assert torch.equal(out[0, 6:], independent_greedy(model, ids[0], 8))


class TestCaches:
    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    @pytest.mark.parametrize("window", [None, 4])
    def test_chunked_prefill(self, kind, cache_kind, implementation, window):
        """Several tokens against a cache that holds some: the same as the whole row at once."""
        model = tiny(attention_type=kind, implementation=implementation, sliding_window=window)
        ids = tokens(2, 14)
        expected = expected_logits(model, ids, allowed=causal(14, window))
        cache = cache_of(cache_kind, model, 17)
        parts = []
        for part in ids.split((5, 1, 2, 6), 1):
            with torch.no_grad():
                parts.append(model(part, past_key_values=cache).logits)
        assert relative_error(torch.cat(parts, 1), expected) < TOLERANCE
        assert int(cache.get_seq_length()) == 14

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("with_positions", [False, True])
    @pytest.mark.parametrize("widened", [False, True])
    def test_chunked_prefill_with_padding_and_holes(self, kind, cache_kind, window, with_positions, widened):
        """With the mask as wide as the tokens so far, or as the whole cache already."""
        model = tiny(attention_type=kind, sliding_window=window)
        ids = tokens(2, 14)
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[0, :3] = 0
        if window is None or not with_positions:  # a window counts holes, so rows alone would be no reference
            mask[1, 2] = mask[1, 6:8] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        cache = cache_of(cache_kind, model, 17)
        parts, at = [], 0
        for part in ids.split((5, 1, 2, 6), 1):
            end = at + part.shape[1]
            given = mask if widened and cache_kind == "static" else mask[:, :end]
            more = {"position_ids": positions[:, at:end]} if with_positions else {}
            with torch.no_grad():
                parts.append(model(part, past_key_values=cache, attention_mask=given, **more).logits)
            at = end
        out = torch.cat(parts, 1)
        for row in range(2):
            real = mask[row].bool()
            if with_positions:
                kept = ids[row, real]
                expected = expected_logits(model, kept[None], allowed=causal(len(kept), window))[0]
            else:
                allowed = causal(14, window) & real
                expected = expected_logits(model, ids[row][None], allowed=allowed)[0, real]
            assert relative_error(out[row, real], expected) < TOLERANCE

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    def test_packed_documents_into_a_cache(self, kind, cache_kind):
        model = tiny(attention_type=kind)
        ids, positions = tokens(1, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
        parts = [expected_logits(model, part) for part in ids.split((5, 7), 1)]
        with torch.no_grad():
            out = model(ids, position_ids=positions, past_key_values=cache_of(cache_kind, model, 17)).logits
        assert relative_error(out, torch.cat(parts, 1)) < TOLERANCE

    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    @pytest.mark.parametrize("window", [None, 3])
    def test_packed_documents_beside_a_past(self, cache_kind, window):
        """The cached tokens go on into the first new document, and the second sees neither."""
        model = tiny(sliding_window=window)
        ids = tokens(1, 12)
        cache = cache_of(cache_kind, model, 17)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            positions = torch.tensor([[4, 5, 6, 0, 1, 2, 3, 4]])
            out = model(ids[:, 4:], position_ids=positions, past_key_values=cache).logits
        first = expected_logits(model, ids[:, :7], allowed=causal(7, window))[:, 4:]
        second = expected_logits(model, ids[:, 7:], allowed=causal(5, window))
        assert relative_error(out, torch.cat((first, second), 1)) < TOLERANCE

    def test_cache_is_made_only_where_it_is_used(self):
        model = tiny()
        ids = tokens(1, 4)
        assert model(ids).past_key_values.get_seq_length() == 4
        assert model(ids, use_cache=False).past_key_values is None
        assert model.train()(ids).past_key_values is None

    @pytest.mark.parametrize("name", FIELDS)
    def test_static_cache_holds_the_shapes_of_the_layout(self, name):
        model = tiny(**FIELDS[name])
        cache = cache_of("static", model, 9)
        with torch.no_grad():
            model(tokens(2, 4), past_key_values=cache)
        layout, layer = model.config.head_layout(), cache.layers[0]
        assert layer.keys.shape == (2, layout.cache_heads, 9, layout.key_width)
        assert layer.values.shape == (2, layout.cache_heads, 9, layout.value_width)
