"""The model against the paper's equations written a second time, transformers' Llama, and hand-computed losses."""

import itertools
import logging
import re

import pytest
import torch
from torch.export import Dim
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import warning_once

from difftransformer import DiffTransformerForCausalLM
from difftransformer.attention import VARIANTS
from difftransformer.errors import ConfigError, ShapeError
from difftransformer.model.pretrained import ATTN_IMPLEMENTATIONS
from difftransformer.ops import observe_inputs
from tests.support import independent_model
from tests.support.independent_model import causal
from tests.support.oracle import relative_error
from tests.support.tiny_models import BASE, scramble, shape_of, tiny, tiny_config, tokens

IMPLEMENTATIONS = ("difftransformer", "eager", "sdpa")
TYPES = ("diff", "diff_v2", "grouped_diff", "softmax")
TOLERANCE = 1e-5

SHAPES = {
    "diff": {},
    "diff, grouped": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    "diff, one group, untied": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "diff, own heads": {"num_differential_heads": 3, "num_differential_key_value_heads": 1, "value_head_dim": 10},
    "diff, value of one map": {"num_differential_heads": 4, "num_differential_key_value_heads": 2, "value_head_dim": 8},
    "diff, odd heads": {
        "hidden_size": 36, "num_attention_heads": 3, "num_differential_heads": 3, "num_differential_key_value_heads": 3,
        "value_head_dim": 12,
    },
    "diff, wide head, theta": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0}},
    "diff, eps": {"rms_norm_eps": 0.1, "head_norm_eps": 0.3, "num_hidden_layers": 4},
    "diff_v2": {"attention_type": "diff_v2"},
    "diff_v2, grouped": {"attention_type": "diff_v2", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "grouped_diff": {"attention_type": "grouped_diff"},
    "grouped_diff, one key": {"attention_type": "grouped_diff", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "grouped_diff, 4:1": {"attention_type": "grouped_diff", "hidden_size": 80, "num_attention_heads": 10},
    "grouped_diff, a key for two noise heads": {
        "attention_type": "grouped_diff", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
        "value_head_dim": 12,
    },
    "grouped_diff, own heads": {
        "attention_type": "grouped_diff", "num_differential_heads": 4, "num_noise_heads": 2,
        "num_differential_key_value_heads": 4,
    },
    "grouped_diff_v2": {"attention_type": "grouped_diff_v2"},
    "grouped_diff_v2, 4:1": {"attention_type": "grouped_diff_v2", "hidden_size": 80, "num_attention_heads": 10},
    "grouped_diff_v2, a key for two noise heads": {
        "attention_type": "grouped_diff_v2", "num_differential_heads": 8, "num_noise_heads": 4,
        "num_differential_key_value_heads": 2, "value_head_dim": 6, "tie_word_embeddings": False,
    },
    "dex": {"attention_type": "dex"},
    "dex, chosen heads": {"attention_type": "dex", "num_key_value_heads": 2, "dex_heads": [[0, 3], [1, 2]]},
    "softmax_norm": {"attention_type": "softmax_norm", "head_norm_eps": 0.3},
    "xsa, grouped": {"attention_type": "xsa", "num_key_value_heads": 2},
    "gate": {"attention_type": "gate"},
    "diff_xsa": {"attention_type": "diff_xsa"},
    "diff_gate, one group": {"attention_type": "diff_gate", "num_key_value_heads": 2},
    "diff_v2_added": {"attention_type": "diff_v2_added"},
    "softmax": {"attention_type": "softmax"},
    "softmax, grouped": {"attention_type": "softmax", "num_key_value_heads": 2, "tie_word_embeddings": False},
}  # fmt: skip


def expected_logits(model, ids, **kwargs):
    """(B, T, vocabulary) of the independent model, row by row."""
    shape, weights = shape_of(model.config), model.state_dict()
    return torch.stack([independent_model.run(weights, shape, row, **kwargs)[0] for row in ids])


@torch.no_grad()
def logits(model, *args, **kwargs):
    return model(*args, **kwargs).logits


def assert_close(found, expected, *where, tolerance=TOLERANCE):
    assert relative_error(found, expected) < tolerance, where


def switched(model):
    """Each implementation, once the model has it."""
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        yield implementation


def restarting(*documents):
    """(1, T) positions that start anew with each document."""
    return torch.cat([torch.arange(length) for length in documents])[None]


class TestEquations:
    @pytest.mark.parametrize("name", SHAPES)
    def test_logits(self, name):
        model, ids = tiny(**SHAPES[name]), tokens(2, 23)
        expected = expected_logits(model, ids)
        for implementation in switched(model):
            assert_close(logits(model, ids), expected, implementation)

    @pytest.mark.parametrize("kind", TYPES)
    def test_longer_than_a_block_of_the_chunked_backend_and_in_float64(self, kind):
        model, ids = tiny(attention_type=kind), tokens(1, 150)
        assert_close(logits(model, ids), expected_logits(model, ids))
        model, ids = model.double(), ids[:, :12]
        assert_close(logits(model, ids), expected_logits(model, ids), tolerance=1e-6)  # rotary tables stay fp32

    @pytest.mark.parametrize("kind", TYPES)
    def test_gradients(self, kind):
        """Of every weight, against autograd through the independent model in float64."""
        model = tiny(attention_type=kind, num_key_value_heads=2)
        ids, labels = tokens(1, 9), tokens(1, 9, seed=2)
        model(ids, labels=labels).loss.backward()
        weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        predicted = independent_model.run(weights, shape_of(model.config), ids[0])[0][:-1]
        loss = (torch.log(torch.exp(predicted).sum(1)) - predicted[torch.arange(8), labels[0, 1:]]).mean()
        expected = torch.autograd.grad(loss, list(weights.values()))
        for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
            assert_close(parameter.grad, gradient, name, tolerance=1e-4)

    @pytest.mark.parametrize("grouped", [False, True])
    def test_softmax_twin_is_llama(self, grouped):
        heads = {"num_key_value_heads": 2 if grouped else 4}
        model = tiny(attention_type="softmax", tie_word_embeddings=False, **heads)
        sizes = {name: value for name, value in BASE.items() if name != "initialization"}
        sizes |= heads | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "bos_token_id": None}
        llama = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)).eval()
        llama.load_state_dict(model.state_dict(), strict=True)
        ids = tokens(2, 17)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        labels = ids.masked_fill(mask == 0, -100)
        with torch.no_grad():
            ours = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
            theirs = llama(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
        real = mask.bool()
        assert_close(ours.logits[real], theirs.logits[real])
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        assert len(ours.hidden_states) == 3
        for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert_close(mine[real], other[real])


class TestMasks:
    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, kind, side):
        """A padded row alone gives the same logits."""
        model = tiny(attention_type=kind)
        lengths = (9, 4, 1)
        batch, mask = tokens(3, 9), torch.zeros(3, 9, dtype=torch.long)
        for row, length in enumerate(lengths):
            mask[row, (slice(9 - length, None) if side == "left" else slice(length))] = 1
        real, positions = mask.bool(), (mask.cumsum(1) - 1).clamp_min(0)
        alone = torch.cat([expected_logits(model, batch[row][real[row]][None])[0] for row in range(3)])
        for implementation in switched(model):
            for given in ({}, {"position_ids": positions}):
                out = logits(model, batch, attention_mask=mask, **given)
                for found, expected in zip(out[real].split(lengths), alone.split(lengths), strict=True):
                    assert_close(found, expected, implementation)
            unmasked = logits(model, batch)
            assert side == "right" or relative_error(unmasked[1], out[1]) > 1e-2  # the mask matters

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
    def test_padding_in_a_loaded_model(self, implementation, tmp_path):
        model = tiny()
        model.save_pretrained(tmp_path)
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
        assert loaded.config._attn_implementation == implementation
        ids, mask = tokens(1, 9), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
        assert_close(logits(loaded, ids, attention_mask=mask)[:, 3:], expected_logits(model, ids[:, 3:]))

    def test_every_implementation_is_tested_with_padding(self):
        assert set(ATTN_IMPLEMENTATIONS) == {*IMPLEMENTATIONS, "paged|eager"}

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_mask_dtypes(self, dtype):
        model, ids, mask = tiny(), tokens(1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
        assert torch.equal(logits(model, ids, attention_mask=mask.to(dtype)), logits(model, ids, attention_mask=mask))

    @pytest.mark.parametrize("kind", TYPES)
    def test_holes(self, kind):
        """Positions counted over real tokens, as generation gives them: the holes might as well not be there."""
        model, ids = tiny(attention_type=kind), tokens(1, 10)
        mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1]])
        real, positions = mask[0].bool(), (mask.cumsum(1) - 1).clamp_min(0)
        in_place = expected_logits(model, ids, allowed=causal(10) & real)[0, real]
        counted = expected_logits(model, ids[:, real])[0]
        for implementation in switched(model):
            for expected, given in ((in_place, {}), (counted, {"position_ids": positions})):
                assert_close(logits(model, ids, attention_mask=mask, **given)[0, real], expected, implementation)

    @pytest.mark.parametrize("kind", TYPES)
    def test_bool_4d_mask_stands_for_everything(self, kind):
        model, ids, allowed = tiny(attention_type=kind), tokens(1, 8), causal(8)
        allowed[:4, :4] = True  # a prefix that sees itself in both directions
        expected = expected_logits(model, ids, allowed=allowed)
        for implementation in switched(model):
            for heads in (1, model.config.head_layout().num_heads):
                out = logits(model, ids, attention_mask=allowed.expand(1, heads, 8, 8))
                assert_close(out, expected, implementation, heads)

    @pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -65504.0, -1e9])
    def test_additive_4d_mask(self, lowest):
        model, ids, allowed = tiny(), tokens(1, 8), causal(8)
        allowed[6, 2] = allowed[7, 5] = False
        mask = torch.zeros(1, 1, 8, 8).masked_fill(~allowed, lowest)
        assert_close(logits(model, ids, attention_mask=mask), expected_logits(model, ids, allowed=allowed))

    def test_bool_4d_mask_beside_a_cache(self):
        model, ids, allowed = tiny(), tokens(1, 8), causal(8)
        allowed[6, 2] = allowed[7, 5] = False
        cache = DynamicCache(config=model.config)
        logits(model, ids[:, :5], past_key_values=cache)
        out = logits(model, ids[:, 5:], past_key_values=cache, attention_mask=allowed[None, None, 5:])
        assert_close(out, expected_logits(model, ids, allowed=allowed)[:, 5:])

    def test_refused(self):
        model, ids = tiny(), tokens(1, 6)
        biased = [torch.zeros(1, 1, 6, 6).index_fill(3, torch.tensor([2]), x) for x in (0.5, -1.0, -1e4, float("nan"))]
        biases = r"attention_mask of torch\.float32 .* biases cannot be added to the logits"
        shape = r"expected \(1, past \+ new tokens\)"
        for mask, words in (
            *((mask, biases) for mask in biased),
            (torch.ones(1, 1, 6, 6, dtype=torch.long), r"attention_mask of torch\.int64 .* is neither bool"),
            (torch.ones(2, 6), shape),
            (torch.ones(1, 6, 6), shape),
            (torch.ones(1, 4), "covers 4 tokens, but 0 are cached and 6 are new"),
            (torch.ones(1, 14), "covers 14 tokens, and 6 are given without past_key_values"),
        ):
            with pytest.raises(ShapeError, match=words):
                model(ids, attention_mask=mask)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        words = "covers 2 tokens, but 6 are cached and 2 are new; pass a mask of width 8"
        for given in ({}, {"position_ids": torch.tensor([[6, 7]])}):
            with pytest.raises(ShapeError, match=words):
                model(ids[:, :2], past_key_values=cache, attention_mask=torch.ones(1, 2), **given)
        with pytest.raises(ShapeError, match=r"position_ids has shape \(1, 5\), expected \(1, 6\)"):
            model(ids, position_ids=torch.arange(5)[None])


class TestSlidingWindow:
    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("window", [1, 4, 11, 99])
    def test_without_cache(self, kind, window):
        model, ids = tiny(attention_type=kind, sliding_window=window), tokens(1, 11)
        expected = expected_logits(model, ids, allowed=causal(11, window))
        for implementation in switched(model):
            assert_close(logits(model, ids), expected, implementation)

    def test_with_padding(self):
        model, ids = tiny(sliding_window=3), tokens(1, 9)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
        expected = expected_logits(model, ids[:, 2:], allowed=causal(7, 3))
        assert_close(logits(model, ids, attention_mask=mask)[:, 2:], expected)


class TestPackedDocuments:
    DOCUMENTS = ((5, 1, 6), (12,), (4, 4, 4))

    def expected(self, model, ids, documents):
        return torch.cat([expected_logits(model, part[None])[0] for part in ids.split(documents)])

    @pytest.mark.parametrize("kind", TYPES)
    def test_restarting_positions(self, kind):
        """With a cache and without one, in one row and in several."""
        model, ids = tiny(attention_type=kind), tokens(3, 12)
        positions = torch.cat([restarting(*row) for row in self.DOCUMENTS])
        expected = [self.expected(model, *row) for row in zip(ids, self.DOCUMENTS, strict=True)]
        for implementation in switched(model):
            for rows, use_cache in itertools.product((1, 3), (False, True)):
                out = logits(model, ids[:rows], position_ids=positions[:rows], use_cache=use_cache)
                for found, alone in zip(out, expected[:rows], strict=True):
                    assert_close(found, alone, implementation, rows, use_cache)

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_with_padding(self, kind, side):
        model, ids, documents = tiny(attention_type=kind), tokens(2, 12), ((4, 5), (3, 9))
        mask, padding = torch.zeros(2, 12, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
        real = slice(3, 12) if side == "left" else slice(0, 9)
        mask[0, real] = mask[1] = 1
        first = (padding, restarting(*documents[0]))
        positions = torch.cat((torch.cat(first if side == "left" else first[::-1], 1), restarting(*documents[1])))
        expected = [self.expected(model, ids[0, real], documents[0]), self.expected(model, ids[1], documents[1])]
        for use_cache in (False, True):
            out = logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=use_cache)
            assert_close(out[0, real], expected[0], use_cache)
            assert_close(out[1], expected[1], use_cache)

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_with_a_token_left_out_inside_a_document(self, use_cache):
        model, ids, mask = tiny(), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
        mask[0, 2] = 0
        out = logits(model, ids, position_ids=restarting(5, 7).expand(2, 12), attention_mask=mask, use_cache=use_cache)
        allowed = causal(5) & (torch.arange(5) != 2)
        for row, allows in zip((0, 1), (allowed, causal(5)), strict=True):
            first, second = ids[row : row + 1].split((5, 7), 1)
            real = mask[row, :5].bool()
            assert_close(out[row, :5][real], expected_logits(model, first, allowed=allows)[0, real], row)
            assert_close(out[row, 5:], expected_logits(model, second)[0], row)

    @pytest.mark.parametrize("kind", TYPES)
    def test_cumulative_lengths(self, kind):
        model, ids, documents = tiny(attention_type=kind), tokens(1, 12), self.DOCUMENTS[0]
        ends, expected = torch.tensor([0, *documents]).cumsum(0), self.expected(model, ids[0], documents)
        for given, use_cache in itertools.product(({}, {"position_ids": restarting(*documents)}), (False, True)):
            out = logits(model, ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=use_cache, **given)
            assert_close(out[0], expected, *given, use_cache)

    def test_cumulative_lengths_are_of_one_row(self):
        model = tiny()
        with pytest.raises(ShapeError, match="cu_seq_lens_q with a batch of 2"):
            model(tokens(2, 6), cu_seq_lens_q=torch.tensor([0, 3, 6]))
        cache = DynamicCache(config=model.config)
        model(tokens(1, 6), past_key_values=cache)
        with pytest.raises(ShapeError, match="6 cached tokens"):
            model(tokens(1, 6), past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 3, 6]))

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_with_a_window(self, use_cache):
        model, ids = tiny(sliding_window=3), tokens(1, 12)
        out = logits(model, ids, position_ids=restarting(5, 7), use_cache=use_cache)
        parts = [expected_logits(model, part, allowed=causal(part.shape[1], 3)) for part in ids.split((5, 7), 1)]
        assert_close(out, torch.cat(parts, 1))

    @pytest.mark.parametrize("window", [None, 3])
    def test_rows_need_no_mask(self, window):
        model, ids, seen = tiny(sliding_window=window), tokens(2, 12), []
        with observe_inputs(lambda maps, restrictions, scale: seen.append(restrictions)):
            model(ids, position_ids=restarting(5, 7), use_cache=False)
        for one in seen:
            assert (one.attn_mask, one.window) == (None, window)
            assert one.cu_seqlens.tolist() == [0, 5, 12, 17, 24]

    def test_training_loss_and_gradients(self):
        """Packed rows give the documents' own losses and gradients."""
        packed, apart = tiny(), tiny()
        ids, positions = tokens(2, 12), restarting(5, 7).expand(2, 12)
        labels = ids.clone()
        labels[:, 5] = -100  # the first token of a document has no one to predict it
        loss = packed.train()(ids, position_ids=positions, labels=labels).loss
        loss.backward()
        total = 0.0
        for part in (ids[:, :5], ids[:, 5:]):
            total = total + apart.train()(part, labels=part, num_items_in_batch=torch.tensor(20)).loss
        total.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-6)
        for (name, ours), theirs in zip(packed.named_parameters(), apart.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, name, tolerance=1e-4)

    def test_hidden_states_and_maps(self):
        model, ids = tiny(implementation="eager"), tokens(3, 12)
        positions = torch.cat([restarting(*row) for row in self.DOCUMENTS])
        with torch.no_grad():
            plain = model(ids, position_ids=positions, output_hidden_states=True, use_cache=False)
            mapped = model(ids, position_ids=positions, output_attentions=True, use_cache=False)
        assert all(hidden.shape == (3, 12, 32) for hidden in plain.hidden_states)
        assert mapped.attentions[0].shape == (3, 2, 12, 12)
        assert torch.all(mapped.attentions[0][0, :, 6:, :6] == 0)
        assert_close(mapped.logits, plain.logits)


class TestLabels:
    def test_shifted_cross_entropy(self):
        model, ids = tiny(), tokens(2, 7)
        labels = ids.clone()
        labels[0, 2:4] = -100
        out = model(ids, labels=labels)
        nats = []
        for row in range(2):
            log_probabilities = torch.log_softmax(out.logits[row].double(), -1)
            nats += [-log_probabilities[t, labels[row, t + 1]] for t in range(6) if labels[row, t + 1] != -100]
        assert len(nats) == 10
        assert out.loss.item() == pytest.approx((sum(nats) / 10).item(), rel=1e-6)
        summed = model(ids, labels=labels, num_items_in_batch=torch.tensor(37)).loss
        assert summed.item() == pytest.approx((sum(nats) / 37).item(), rel=1e-6)
        assert model(ids).loss is None

    def test_logits_to_keep(self):
        model, ids, places = tiny(), tokens(2, 7), torch.tensor([0, 4])
        whole = logits(model, ids)
        assert_close(logits(model, ids, logits_to_keep=3), whole[:, -3:], tolerance=1e-6)
        assert_close(logits(model, ids, logits_to_keep=places), whole[:, places], tolerance=1e-6)

    def test_return_dict(self):
        model, ids = tiny(), tokens(1, 5)
        out = model(ids, return_dict=False, use_cache=False)
        assert isinstance(out, tuple)
        assert torch.equal(out[0], model(ids).logits)


class TestInputs:
    def test_embeddings_in_place_of_ids(self):
        model, ids = tiny(), tokens(2, 7)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(logits(model, inputs_embeds=embedded), logits(model, ids))
        assert_close(logits(model, inputs_embeds=embedded.mT.contiguous().mT), logits(model, ids))

    def test_exactly_one(self):
        model = tiny()
        for arguments in ({}, {"input_ids": tokens(1, 2), "inputs_embeds": torch.zeros(1, 2, 32)}):
            with pytest.raises(ShapeError, match="exactly one of input_ids and inputs_embeds"):
                model(**arguments)


class TestOutputs:
    @pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"attention_type": "softmax"}])
    def test_maps(self, fields):
        model, ids = tiny(implementation="eager", **fields), tokens(2, 9)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        with torch.no_grad():
            out = model(ids, attention_mask=mask, output_attentions=True)
        _, _, expected = independent_model.run(model.state_dict(), shape_of(model.config), ids[0])
        for layer, (maps, theirs) in enumerate(zip(out.attentions, expected, strict=True)):
            assert maps.dtype == torch.float32
            assert (maps[0].double() - theirs).abs().max() < 1e-5
            lam = model.model.layers[layer].self_attn.lam()
            total = 1.0 if lam is None else 1 - lam.item()
            rows = maps.sum(-1)
            assert torch.allclose(rows[0], torch.full_like(rows[0], total), atol=1e-5)
            assert torch.all(maps[1, :, :, :4] == 0)
            assert torch.allclose(rows[1, :, 4:], torch.full_like(rows[1, :, 4:], total), atol=1e-5)

    @pytest.mark.parametrize("kind", VARIANTS)
    def test_the_output_is_computed_from_the_maps(self, kind):
        """Logits with maps are those without, and so are gradients; they also reach the maps and hidden states themselves."""
        model, ids = tiny(attention_type=kind, implementation="eager"), tokens(2, 7)
        plain = model(ids)
        plain.logits.square().sum().backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        out = model(ids, output_attentions=True, output_hidden_states=True)
        for kept in (*out.attentions, *out.hidden_states):
            kept.retain_grad()
        out.logits.square().sum().backward()
        torch.testing.assert_close(out.logits, plain.logits, atol=1e-5, rtol=1e-5)
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name], name)
        assert all(kept.grad.abs().max() > 0 for kept in (*out.attentions, *out.hidden_states))

    @pytest.mark.parametrize("implementation", ["difftransformer", "sdpa"])
    def test_maps_do_not_depend_on_the_implementation(self, implementation):
        model, ids = tiny(implementation=implementation).double(), tokens(2, 9)
        with torch.no_grad():
            found, plain = model(ids, output_attentions=True), model(ids)
            model.set_attn_implementation("eager")
            expected = model(ids, output_attentions=True)
        assert all(torch.equal(*maps) for maps in zip(found.attentions, expected.attentions, strict=True))
        torch.testing.assert_close(found.logits, plain.logits, atol=1e-12, rtol=1e-12)


class TestImplementations:
    @pytest.mark.parametrize(
        "name", ["flex_attention", "flash", "paged|sdpaa", "sdpaa", "kernels-community/flash-attn"]
    )
    def test_unknown_is_refused_with_the_allowed_names(self, name):
        allowed = re.escape("difftransformer, eager, paged|eager, sdpa")
        words = (
            rf"not supported; leave it out for the default kernels \('difftransformer'\), or choose one of {allowed}$"
        )
        with pytest.raises(ConfigError, match=words):
            DiffTransformerForCausalLM._from_config(tiny_config(), attn_implementation=name)
        model = tiny()
        with pytest.raises(ConfigError, match=words):
            model.set_attn_implementation(name)
        assert model.config._attn_implementation == "difftransformer"

    @pytest.mark.parametrize("name", ATTN_IMPLEMENTATIONS)
    def test_backend_of_every_layer(self, name):
        backend = {"difftransformer": "chunked", "eager": "reference", "paged|eager": "reference", "sdpa": "sdpa"}[name]
        built = DiffTransformerForCausalLM._from_config(tiny_config(attn_backend="chunked"), attn_implementation=name)
        switched = DiffTransformerForCausalLM(tiny_config(attn_backend="chunked"))
        assert {layer.self_attn.backend for layer in switched.model.layers} == {"chunked"}
        switched.set_attn_implementation(name)
        for model in (built, switched):
            assert {layer.self_attn.backend for layer in model.model.layers} == {backend}
            assert model.config._attn_implementation == model.model.config._attn_implementation == name

    @pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
    def test_flash_attention_chooses_the_default_and_says_so_once(self, name, tmp_path):
        tiny().save_pretrained(tmp_path)
        warning_once.cache_clear()
        heard = _Heard("difftransformer.model.pretrained")
        for open_model in (DiffTransformerForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
            model = open_model(tmp_path, attn_implementation=name)
            assert {layer.self_attn.backend for layer in model.model.layers} == {"auto"}
            assert model.config._attn_implementation == "difftransformer"
        model.set_attn_implementation("sdpa")
        model.set_attn_implementation(name)
        assert {layer.self_attn.backend for layer in model.model.layers} == {"auto"}
        heard.close()
        words = f"attn_implementation='{name}': the model's default kernels are used in its place"
        assert heard.lines == [words]


class _Heard(logging.Handler):
    """Collects what loggers say, whether or not they propagate it."""

    def __init__(self, *names):
        super().__init__()
        self.lines, self._loggers = [], [logging.getLogger(name) for name in names]
        for logger in self._loggers:
            logger.addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def close(self):
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()


class TestTraining:
    @pytest.mark.parametrize("kind", TYPES)
    def test_gradient_checkpointing_gives_the_same_gradients(self, kind):
        plain, saved = tiny(attention_type=kind).train(), tiny(attention_type=kind).train()
        # The name changed within transformers 5.
        getattr(saved, "activation_checkpointing_enable", saved.gradient_checkpointing_enable)()
        calls = []
        saved.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
        ids = tokens(2, 11)
        for model in (plain, saved):
            model(ids, labels=ids).loss.backward()
        assert len(calls) == 2  # the layer was run again in the backward pass
        for (name, a), b in zip(plain.named_parameters(), saved.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
        cache = DynamicCache(config=saved.config)
        with torch.no_grad():
            saved.eval()(ids, past_key_values=cache)
        with pytest.raises(ConfigError, match="past_key_values with gradient checkpointing"):
            saved.train()(ids, past_key_values=cache)

    def test_generate_in_training_mode_with_gradient_checkpointing_warns_as_llama_does(self):
        """The cache is dropped and the same tokens come out, each of which saw one token; a plain step is silent."""
        model, said, made = tiny(attention_type="softmax", tie_word_embeddings=False), [], []
        sizes = {name: value for name, value in BASE.items() if name != "initialization"}
        sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "rms_norm_eps": 1e-5}
        llama = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, tie_word_embeddings=False))
        llama.load_state_dict(model.state_dict(), strict=True)
        heard = _Heard("difftransformer.model.modeling", "transformers.modeling_layers")
        for each in (model, llama):
            getattr(each.train(), "activation_checkpointing_enable", each.gradient_checkpointing_enable)()
            warning_once.cache_clear()
            made.append(each.generate(tokens(1, 5), max_new_tokens=4, do_sample=False))
            said.append([line for line in heard.lines if line.startswith("Caching is incompatible with gradient")])
            heard.lines.clear()
            warning_once.cache_clear()
        model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
        heard.close()
        assert not heard.lines
        assert [len(lines) for lines in said] == [1, 1]
        assert "`past_key_values=None`" in said[0][0]
        assert "`past_key_values=None`" in said[1][0]
        assert torch.equal(*made)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", TYPES)
    def test_low_precision_is_near_fp32(self, kind, dtype):
        """Within some tens of roundings of the dtype: two layers of five products each, over logits of one scale."""
        model, ids = tiny(attention_type=kind), tokens(2, 15)
        expected = expected_logits(model, ids)
        narrow = logits(model.to(dtype), ids)
        assert narrow.dtype == dtype
        assert relative_error(narrow, expected) < 12 * torch.finfo(dtype).eps

    def test_autocast(self):
        model, ids = tiny().train(), tokens(2, 15)
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids, labels=ids)
        out.loss.backward()
        assert relative_error(out.logits, expected) < 0.1
        assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diff", "softmax", "diff_v2", "grouped_diff"])
@torch.no_grad()
def test_compiled_without_a_graph_break(kind):
    model, ids = tiny(attention_type=kind, num_hidden_layers=1, embedding_multiplier=3.3), tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    real, expected = mask.bool(), expected_logits(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for inputs in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
        assert_close(compiled(**inputs, use_cache=False).logits, expected, *inputs)
    found = compiled(ids, use_cache=False, attention_mask=mask).logits
    assert_close(found[real], logits(model, ids, attention_mask=mask)[real])


@pytest.mark.parametrize("fields", [{}, {"attention_type": "grouped_diff_v2", "sliding_window": 5}])
@torch.no_grad()
def test_one_graph_with_the_cache_that_forward_makes(fields):
    model, ids = tiny(num_hidden_layers=1, **fields), tokens(2, 9)
    torch._dynamo.reset()
    found, expected = torch.compile(model, fullgraph=True, backend="eager")(ids), model(ids)
    assert_close(found.logits, expected.logits)
    for ours, theirs in zip(found.past_key_values.layers, DynamicCache(config=model.config).layers, strict=True):
        assert type(ours) is type(theirs)
        assert getattr(ours, "sliding_window", None) == getattr(theirs, "sliding_window", None)


@pytest.mark.slow
def test_an_exported_program_takes_any_length():
    model, ids = tiny(num_hidden_layers=1), tokens(2, 9)
    sizes = {0: Dim("B"), 1: Dim("T")}
    program = torch.export.export(
        model,
        (),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False},
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes, "use_cache": None},
    )
    assert "difftransformer" not in str(program.graph)  # it runs where the package is not
    for batch, length in ((3, 5), (1, 1100)):
        ids = tokens(batch, length)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        out = program.module()(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert_close(out[mask.bool()], logits(model, ids, attention_mask=mask)[mask.bool()])


def test_scramble_leaves_no_weight_at_its_start():
    """The helper of these tests: a gain of 1 or a lambda of lambda_init would hide mistakes."""
    fresh, drawn = DiffTransformerForCausalLM(tiny_config()), tiny()
    for (name, a), b in zip(fresh.named_parameters(), drawn.parameters(), strict=True):
        assert not torch.isclose(a, b).all(), name
    assert scramble(fresh) is fresh
