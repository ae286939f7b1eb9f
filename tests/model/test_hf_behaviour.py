"""What transformers' users rely on: generation, caches, padding, packing, labels, saving, compilation."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from small_models import VOCABULARY, make_config, make_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from difftransformer import DiffTransformerForCausalLM
from difftransformer.errors import ConfigError, ShapeError
from difftransformer.model.modeling import ATTN_IMPLEMENTATIONS

LENGTHS = (11, 6, 9)


def tokens(*shape, seed=3):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(side):
    """Rows of LENGTHS tokens in one batch, with the mask."""
    ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    rows = [tokens(1, length, seed=length) for length in LENGTHS]
    for i, row in enumerate(rows):
        place = slice(11 - LENGTHS[i], 11) if side == "left" else slice(0, LENGTHS[i])
        ids[i, place], mask[i, place] = row[0], 1
    return ids, mask, rows


def greedy(model, ids, **keywords):
    return model.generate(ids, max_new_tokens=9, do_sample=False, **keywords)


@pytest.mark.parametrize("window", [None, 4])
def test_greedy_generation_does_not_depend_on_the_cache(shape, window):
    model = make_model(shape, sliding_window=window, tie_word_embeddings=False)
    ids = tokens(8, 10)
    uncached = greedy(model, ids, use_cache=False)
    assert uncached[:, 10:].unique().numel() > 3  # a model that repeats one token would agree with anything
    assert torch.equal(uncached, greedy(model, ids))
    assert torch.equal(uncached, greedy(model, ids, cache_implementation="static"))


@pytest.mark.parametrize("implementation", list(ATTN_IMPLEMENTATIONS))
def test_a_padded_batch_is_each_row_alone(shape, implementation):
    model = make_model(shape)
    expected = [model(row).logits[0] for row in padded("left")[2]]
    generated = [greedy(model, row)[0, row.shape[1] :] for row in padded("left")[2]]
    model.set_attn_implementation(implementation)
    for side in ("left", "right"):
        ids, mask, rows = padded(side)
        logits = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            place = slice(11 - row.shape[1], 11) if side == "left" else slice(0, row.shape[1])
            assert torch.allclose(logits[i, place], expected[i], atol=1e-5, rtol=1e-5)
    ids, mask, rows = padded("left")
    for cache in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        found = greedy(model, ids, attention_mask=mask, **cache)[:, 11:]
        assert all(torch.equal(found[i], generated[i]) for i in range(3))


def test_padding_acts_when_a_model_is_opened_with_an_implementation(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids, mask, rows = padded("left")
    for implementation in ATTN_IMPLEMENTATIONS:
        opened = DiffTransformerForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        logits = opened(ids, attention_mask=mask).logits
        assert torch.allclose(logits[1, 5:], model(rows[1]).logits[0], atol=1e-5, rtol=1e-5)


def test_a_mask_with_holes_hides_the_holes(model):
    ids = tokens(1, 10)
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[0, 4:6] = 0
    changed = ids.clone()
    changed[0, 4:6] = ids[0, 4:6] % (VOCABULARY - 1) + 1
    after = model(ids, attention_mask=mask).logits[0, 6:]
    assert torch.equal(after, model(changed, attention_mask=mask).logits[0, 6:])
    assert not torch.allclose(after, model(ids).logits[0, 6:], atol=1e-3)


def test_unknown_implementations_and_masks_are_refused(model):
    with pytest.raises(ConfigError, match="choose one of difftransformer, eager, sdpa"):
        model.set_attn_implementation("paged_attention")
    ids = tokens(1, 6)
    with pytest.raises(ShapeError, match="expected bool"):
        model(ids, attention_mask=torch.zeros(1, 1, 6, 6))
    with pytest.raises(ShapeError, match="covers 4 tokens"):
        model(ids, attention_mask=torch.ones(1, 4))
    with pytest.raises(ShapeError, match="exactly one"):
        model(ids, inputs_embeds=model.model.embed_tokens(ids))
    with pytest.raises(ConfigError, match="only 'eager' forms"):
        model(ids, output_attentions=True)


def test_a_bool_4d_mask_stands_for_every_restriction(model):
    ids = tokens(2, 8)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    assert torch.allclose(model(ids, attention_mask=causal).logits, model(ids).logits, atol=1e-6)
    everything = torch.ones_like(causal)
    assert not torch.allclose(model(ids, attention_mask=everything).logits, model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_read_in_parts_is_the_prompt(shape, kind, window):
    model = make_model(shape, sliding_window=window)
    ids = tokens(2, 14)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    parts, start = [], 0
    for length in (4, 3, 1, 6):
        parts.append(model(ids[:, start : start + length], past_key_values=cache, use_cache=True).logits)
        start += length
    assert torch.allclose(torch.cat(parts, 1), model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_packed_documents_do_not_see_each_other(model, batch, use_cache):
    ids = tokens(batch, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    logits = model(ids, position_ids=positions.expand(batch, -1), use_cache=use_cache).logits
    for start, end in ((0, 5), (5, 8), (8, 12)):
        alone = model(ids[:, start:end], use_cache=False).logits
        assert torch.allclose(logits[:, start:end], alone, atol=1e-5, rtol=1e-5)


def test_packed_rows_may_be_padded_and_cut_differently(model):
    ids, mask, rows = padded("right")
    positions = torch.arange(11).repeat(3, 1)
    positions[0, 4:] -= 4
    positions[2, 2:] -= 2
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.allclose(logits[0, 4:], model(rows[0][:, 4:]).logits[0], atol=1e-5, rtol=1e-5)
    assert torch.allclose(logits[1, :6], model(rows[1]).logits[0], atol=1e-5, rtol=1e-5)
    assert torch.allclose(logits[2, 2:9], model(rows[2][:, 2:]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_cumulative_lengths_pack_a_row(model, use_cache):
    ids = tokens(1, 9)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = model(ids, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=use_cache).logits
    assert torch.allclose(found[:, 4:], model(ids[:, 4:]).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ShapeError, match="one row"):
        model(tokens(2, 9), cu_seq_lens_q=bounds)


def test_later_tokens_change_nothing_before_them(model):
    ids = tokens(2, 16)
    changed = ids.clone()
    changed[:, 9:] = tokens(2, 7, seed=8)
    assert torch.equal(model(ids).logits[:, :9], model(changed).logits[:, :9])


def test_the_loss_is_a_shifted_cross_entropy(model):
    ids = tokens(2, 10)
    labels = ids.clone()
    labels[0, :4] = -100
    found = model(ids, labels=labels)
    flat = F.cross_entropy(found.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction="none")
    kept = labels[:, 1:].reshape(-1) != -100
    assert torch.allclose(found.loss, flat[kept].mean(), rtol=1e-6)
    assert torch.allclose(model(ids, labels=labels, num_items_in_batch=7).loss, flat[kept].sum() / 7, rtol=1e-6)


def test_outputs_that_are_asked_for(model):
    ids = tokens(2, 8)
    full = model(ids)
    assert torch.equal(model(ids, logits_to_keep=3).logits, full.logits[:, -3:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, full.logits[:, [1, 4]])
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, full.logits)
    assert isinstance(model(ids, return_dict=False), tuple)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert torch.equal(states[0], model.model.embed_tokens(ids))
    assert torch.equal(model.lm_head(states[-1]), full.logits)


def test_maps_are_those_that_multiplied_the_values(model):
    model.set_attn_implementation("eager")
    ids = tokens(2, 8)
    out = model(ids, output_attentions=True)
    assert torch.allclose(out.logits, model(ids).logits, atol=1e-6)
    layer = model.model.layers[0]
    attention, layout = layer.self_attn, layer.self_attn.layout
    hidden = layer.input_layernorm(model.model.embed_tokens(ids))
    values = attention.v_proj(hidden).view(2, 8, -1, layout.value_head_dim).transpose(1, 2)
    values = values.repeat_interleave(layout.num_heads // layout.num_key_value_heads, 1)
    heads = out.attentions[0] @ values
    if attention.lam() is not None:
        heads = attention.head_norm(heads) * (1 - attention.lambda_init)
        assert torch.allclose(
            out.attentions[0].sum(-1), 1 - attention.lam() + torch.zeros(2, layout.num_heads, 8), atol=1e-5
        )
    attended = attention.o_proj(heads.transpose(1, 2).reshape(2, 8, -1))
    expected, _ = attention(hidden, position_embeddings=model.model.rotary_emb(torch.arange(8)[None]), is_causal=True)
    assert torch.allclose(attended, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lambdas_and_rotary_tables_are_never_narrowed(tmp_path, dtype):
    model = make_model("diff-gqa")
    before = {n: p.clone() for n, p in model.named_parameters() if "lambda" in n}
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    cast = copy.deepcopy(model).to(dtype)
    opened = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for narrow in (cast, opened):
        parameters = dict(narrow.named_parameters())
        assert parameters["model.layers.0.self_attn.q_proj.weight"].dtype == dtype
        assert all(parameters[name].dtype == torch.float32 for name in before)
        assert all(torch.equal(parameters[name], value) for name, value in before.items())
        assert torch.equal(narrow.model.rotary_emb.inv_freq, frequencies)
        ids = tokens(2, 12)
        error = (narrow(ids).logits.float() - model(ids).logits).abs().max() / model(ids).logits.abs().max()
        assert error < 0.1
        narrow(ids, labels=ids).loss.backward()
        assert all(parameters[name].grad.dtype == torch.float32 for name in before)


def test_saving_and_opening_change_nothing(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    for opened in (
        DiffTransformerForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), opened.state_dict().values(), strict=True)
        )
        assert torch.equal(opened.eval()(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    assert AutoConfig.from_pretrained(tmp_path).head_layout() == model.config.head_layout()
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "DiffTransformerModel"


def test_gradient_checkpointing_changes_no_gradient(model):
    ids = tokens(2, 10)
    model.train()
    model(ids, labels=ids).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert all(torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("mask", [False, True])
def test_the_whole_model_compiles_without_a_break(shape, mask):
    model = make_model(shape)
    ids, attention_mask, _ = padded("left")
    keywords = {"attention_mask": attention_mask} if mask else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    real = attention_mask.bool() if mask else torch.ones_like(ids, dtype=torch.bool)
    found = compiled(ids, use_cache=False, **keywords).logits[real]
    assert torch.allclose(found, model(ids, use_cache=False, **keywords).logits[real], atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_beams_and_samples(model):
    ids, mask, _ = padded("left")
    assert model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=5).shape == (3, 16)
    torch.manual_seed(0)
    assert model.generate(ids, attention_mask=mask, do_sample=True, top_k=5, max_new_tokens=5).shape == (3, 16)


ORDERS = {
    "ours first": "import difftransformer; from transformers import AutoModelForCausalLM as A",
    "theirs first": "from transformers import AutoModelForCausalLM as A; import difftransformer",
    "theirs half loaded": "import difftransformer; from transformers.models.llama import modeling_llama;"
    "from transformers import AutoModelForCausalLM as A",
    "lazy module first": "import transformers, difftransformer; A = transformers.AutoModelForCausalLM",
}


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_the_model_in_either_order(order, tmp_path):
    make_model("diff").save_pretrained(tmp_path)
    code = f"{ORDERS[order]}; print(type(A.from_pretrained({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "DiffTransformerForCausalLM", done.stderr[-1000:]


@pytest.mark.parametrize("arguments", [["-c", "import difftransformer"], ["-m", "difftransformer", "--help"]])
def test_importing_and_help_are_light(arguments):
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "difftransformer" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "matplotlib"}


def test_a_config_makes_its_twin():
    config = make_config("diff-gqa")
    twin = config.twin("softmax")
    assert (config.attention_type, twin.attention_type) == ("diff", "softmax")
    assert {k: v for k, v in config.to_dict().items() if k != "attention_type"} == {
        k: v for k, v in twin.to_dict().items() if k != "attention_type"
    }
