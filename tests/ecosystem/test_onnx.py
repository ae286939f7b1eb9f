"""ONNX by torch and by transformers, computed by onnxruntime at other lengths than the exported ones."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import DynamicCache, StaticCache

from difftransformer.attention import VARIANTS
from difftransformer.ops import inverse_frequencies, rotary_tables
from tests.support.oracle import relative_error
from tests.support.tiny_folders import differential_qwen
from tests.support.tiny_models import scramble, tiny, tokens

# torch's own converter uses what torch deprecates, and warns of two inputs with the same free dimensions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]


@pytest.fixture
def onnx(needs, tmp_path):
    """Export a module whose first two dimensions are free, and return a function that onnxruntime computes."""
    needs("onnxscript")
    runtime = needs("onnxruntime")

    def compiled(module, *inputs):
        sizes = {0: Dim("B"), 1: Dim("T")}
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, dynamic_shapes=(sizes,) * len(inputs))
        program.save(tmp_path / "model.onnx")
        session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]

        def run(*arguments):
            given = dict(zip(names, (x.numpy() for x in arguments), strict=True))
            return [torch.from_numpy(out) for out in session.run(None, given)]

        return run

    return compiled


@pytest.mark.parametrize("kind", ["ours", "a differential Qwen3"])
def test_a_model(kind, onnx, tmp_path):
    """With padding on the left, and inside of a row."""
    if kind == "ours":
        model = tiny(use_cache=False, num_hidden_layers=1, num_key_value_heads=2, sliding_window=8)
    else:
        model = scramble(differential_qwen(tmp_path / "m")).eval()
        model.config.use_cache = False
    ids = tokens(2, 9)
    run = onnx(model, ids, torch.ones_like(ids))
    for shape in ((2, 9), (3, 21)):
        ids = tokens(*shape)
        mask = torch.ones_like(ids)
        mask[0, :4] = mask[1, 3:5] = 0
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask).logits
        (found,) = run(ids, mask)
        assert relative_error(found[mask.bool()], wanted[mask.bool()]) < 1e-5


class EveryVariant(nn.Module):
    """The layers of all variants in a row."""

    def __init__(self):
        super().__init__()
        models = [tiny(attention_type=name, hidden_size=40, num_attention_heads=10, head_dim=4) for name in VARIANTS]
        self.layers = nn.ModuleList(model.model.layers[0].self_attn for model in models)

    def forward(self, hidden):
        rotation = rotary_tables(torch.arange(hidden.shape[1])[None], inverse_frequencies(4))
        return [layer(hidden, position_embeddings=rotation)[0] for layer in self.layers]


@torch.no_grad()
def test_every_variant(onnx):
    module = EveryVariant().eval()
    run = onnx(module, torch.randn(2, 9, 40))
    hidden = torch.randn(3, 17, 40)
    for found, wanted in zip(run(hidden), module(hidden), strict=True):
        assert relative_error(found, wanted) < 1e-5


def step(model, rows, past, length, slots=None):
    """A forward's keywords after `past` tokens: the next `length` ones, with padding, beside a cache of free or fixed size."""
    ids = tokens(rows, past + length)
    mask = torch.ones(rows, slots or past + length, dtype=torch.long)
    mask[0, :2] = 0
    cache = DynamicCache(config=model.config) if slots is None else StaticCache(model.config, max_cache_len=slots)
    with torch.no_grad():
        model(ids[:, :past], attention_mask=mask[:, : slots or past], past_key_values=cache, use_cache=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past : past + length]
    words = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    return {"input_ids": ids[:, past:]} | words


@pytest.mark.parametrize(
    ("name", "slots", "others"),
    [
        ("diff", None, ((2, 7, 3), (3, 9, 1), (1, 12, 5))),
        ("diff_v2", 16, ((2, 7, 3), (2, 11, 3))),
        ("qwen3", None, ((2, 7, 3), (3, 9, 1))),
    ],
)
def test_with_a_cache(name, slots, others, needs, tmp_path):
    """By transformers' exporter, whose graph takes the cache and returns it; rows, tokens and a past that grow are free."""
    needs("onnxscript")
    needs("onnxruntime")
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    if name == "qwen3":
        model = scramble(differential_qwen(tmp_path / "m")).eval()
    else:
        model = tiny(attention_type=name, num_hidden_layers=1, hidden_size=40, num_attention_heads=10, head_dim=4)
    exported = OnnxExporter().export(model, step(model, *others[0], slots), OnnxConfig(dynamic=slots is None))
    for sizes in others:
        given = step(model, *sizes, slots)
        with torch.no_grad():
            wanted = model(**copy.deepcopy(given))
        found = exported(**copy.deepcopy(given))
        assert relative_error(found.logits, wanted.logits) < 1e-5
        for layer, expected in zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True):
            assert relative_error(layer.keys, expected.keys) < 1e-5
            assert relative_error(layer.values, expected.values) < 1e-5
