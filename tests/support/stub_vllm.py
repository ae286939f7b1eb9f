"""A stand-in for vLLM: the layers that our model uses, in plain PyTorch, for one process and one request.

Constructors take vLLM's parameters by name and in its order, and nothing else; tests/serving/test_vllm.py compares them with
vLLM's. A parameter that a single process does not need must have its default.
"""

import math
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

PADDING = 64  # vLLM pads the vocabulary


class Registry:
    """vllm.ModelRegistry."""

    def __init__(self):
        self.models, self.convertors = {}, {}

    def get_supported_archs(self):
        return self.models.keys()

    def register_model(self, model_arch, model_cls):
        self.models[model_arch] = model_cls


def whole_loader(param, loaded_weight):
    assert param.shape == loaded_weight.shape, (param.shape, loaded_weight.shape)
    param.data.copy_(loaded_weight)


class LinearBase(nn.Module):
    def __init__(self, input_size, output_size, bias, quant_config):
        super().__init__()
        assert bias is False
        assert quant_config is None
        # NaN, as uninitialised memory may hold: what is not loaded shows.
        self.weight = nn.Parameter(torch.full((output_size, input_size), math.nan), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight):
        whole_loader(param, loaded_weight)

    def forward(self, input_):
        return F.linear(input_, self.weight), None


class ColumnParallelLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, gather_output=False, skip_bias_add=False,
                 params_dtype=None, quant_config=None, prefix="", *, return_bias=True,
                 disable_tp=False):  # fmt: skip
        super().__init__(input_size, output_size, bias, quant_config)


class MergedColumnParallelLinear(LinearBase):
    def __init__(self, input_size, output_sizes, bias=True, gather_output=False, skip_bias_add=False,
                 params_dtype=None, quant_config=None, prefix="", *, return_bias=True, disable_tp=False):  # fmt: skip
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias, quant_config)

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None):
        first = sum(self.output_sizes[:loaded_shard_id])
        whole_loader(param[first : first + self.output_sizes[loaded_shard_id]], loaded_weight)


class RowParallelLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, input_is_parallel=True, skip_bias_add=False,
                 params_dtype=None, reduce_results=True, quant_config=None, prefix="", *, return_bias=True,
                 disable_tp=False):  # fmt: skip
        super().__init__(input_size, output_size, bias, quant_config)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = torch.ones(hidden_size)
        if has_weight:
            self.weight = nn.Parameter(torch.full((hidden_size,), math.nan), requires_grad=False)

    def forward(self, x, residual=None):
        assert x.shape[-1] == self.hidden_size
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return normed if residual is None else (normed, total)


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, params_dtype=None, org_num_embeddings=None,
                 padding_size=PADDING, quant_config=None, prefix=""):  # fmt: skip
        super().__init__()
        self.num_embeddings = num_embeddings
        rows = math.ceil(num_embeddings / padding_size) * padding_size
        self.weight = nn.Parameter(torch.full((rows, embedding_dim), math.nan), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight):
        whole_loader(param[: self.num_embeddings], loaded_weight)
        param.data[self.num_embeddings :] = 0

    def forward(self, input_):
        return F.embedding(input_, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    def __init__(self, num_embeddings, embedding_dim, bias=False, params_dtype=None, org_num_embeddings=None,
                 padding_size=PADDING, quant_config=None, prefix=""):  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config)

    def tie_weights(self, embed_tokens):
        self.weight = embed_tokens.weight
        return self

    def forward(self, input_):
        raise RuntimeError("LMHead's weights should be used in the sampler.")


class LogitsProcessor(nn.Module):
    def __init__(self, vocab_size, org_vocab_size=None, scale=1.0, logits_as_input=False, soft_cap=None):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, lm_head, hidden_states, embedding_bias=None):
        return F.linear(hidden_states, lm_head.weight)[..., : self.vocab_size]


class Rotary(nn.Module):
    """Half-split, on flat queries and keys of any number of heads."""

    def __init__(self, head_size, max_position, theta):
        super().__init__()
        self.head_size = head_size
        angles = torch.outer(torch.arange(max_position), theta ** (-torch.arange(0, head_size, 2) / head_size))
        self.tables = angles.cos(), angles.sin()

    def forward(self, positions, query, key=None):
        cos, sin = (table[positions].unsqueeze(1) for table in self.tables)

        def turn(flat):
            first, second = flat.view(len(positions), -1, self.head_size).chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).view_as(flat)

        return turn(query), turn(key)


def get_rope(
    head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None, dual_chunk_attention_config=None
):
    assert is_neox_style
    assert rope_parameters["rope_type"] == "default"
    return Rotary(head_size, max_position, rope_parameters["rope_theta"])


class Attention(nn.Module):
    """Grouped-query attention of one request, written out, with the keys and values of all tokens so far."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, use_alibi_sqrt=None,
                 cache_config=None, quant_config=None, logits_soft_cap=None, per_layer_sliding_window=None,
                 prefix="", attn_type="decoder", kv_sharing_target_layer_name=None, attn_backend=None,
                 head_size_v=None):  # fmt: skip
        super().__init__()
        assert num_heads % num_kv_heads == 0
        assert head_size_v in (None, head_size)
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale
        self.window, self.prefix = per_layer_sliding_window, prefix
        self.keys = self.values = torch.empty(0, num_kv_heads, head_size)

    def forward(self, query, key, value, output_shape=None):
        query = query.view(-1, self.num_heads, self.head_size)
        seen = len(self.keys)
        self.keys = torch.cat((self.keys, key.view(-1, self.num_kv_heads, self.head_size)))
        self.values = torch.cat((self.values, value.view(-1, self.num_kv_heads, self.head_size)))
        assert len(self.keys) == len(self.values) == seen + len(query)
        out = torch.empty_like(query)
        for token in range(len(query)):
            end = seen + token + 1
            first = 0 if self.window is None else max(0, end - self.window)
            for head in range(self.num_heads):
                group = head // (self.num_heads // self.num_kv_heads)
                weights = torch.softmax(self.keys[first:end, group] @ query[token, head] * self.scale, 0)
                out[token, head] = weights @ self.values[first:end, group]
        return out.view(len(query), -1)


class PPMissingLayer(nn.Identity):
    pass


class WeightsMapper:
    def __init__(self, orig_to_new_stacked=None):
        self.stacked = orig_to_new_stacked


class AutoWeightsLoader:
    """Give each child the tensors under its name, in the order of the file, as vLLM does."""

    def __init__(self, module, *, ignore_unexpected_prefixes=None, ignore_unexpected_suffixes=None):
        self.module = module

    def load_weights(self, weights, *, mapper=None):
        loaded = set()
        for name, tensor in weights:
            child = getattr(self.module, name.partition(".")[0])
            if hasattr(child, "load_weights"):
                child_name, _, rest = name.partition(".")
                loaded |= {f"{child_name}.{filled}" for filled in child.load_weights([(rest, tensor)])}
                continue
            place = ()
            for old, (new, part) in (mapper.stacked if mapper else {}).items():
                if old in name:
                    name, place = name.replace(old, new), (part,)
            parameter = dict(self.module.named_parameters())[name]
            getattr(parameter, "weight_loader", whole_loader)(parameter, tensor, *place)
            loaded.add(name)
        return loaded


class ArchConvertor:
    def __init__(self, hf_config, hf_text_config, revision=None):
        self.hf_config, self.hf_text_config = hf_config, hf_text_config


class IntermediateTensors:
    def __init__(self, tensors):
        self.tensors = tensors

    def __getitem__(self, key):
        return self.tensors[key]


def make_layers(num_hidden_layers, layer_fn, prefix):
    return 0, num_hidden_layers, nn.ModuleList(layer_fn(prefix=f"{prefix}.{i}") for i in range(num_hidden_layers))


def install(monkeypatch):
    """Put the stand-in where `import vllm` finds it, and return its registry."""
    registry = Registry()
    group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    modules = {
        "vllm": {"ModelRegistry": registry},
        "vllm.compilation": {},
        "vllm.compilation.decorators": {"support_torch_compile": lambda cls: cls},
        "vllm.config": {"VllmConfig": object},
        "vllm.distributed": {
            "get_pp_group": lambda: group,
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
        "vllm.model_executor.layers.attention": {"Attention": Attention},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm},
        "vllm.model_executor.layers.linear": {
            "ColumnParallelLinear": ColumnParallelLinear,
            "MergedColumnParallelLinear": MergedColumnParallelLinear,
            "RowParallelLinear": RowParallelLinear,
        },
        "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "vllm.model_executor.layers.rotary_embedding": {"get_rope": get_rope},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.interfaces": {"SupportsPP": type("SupportsPP", (), {})},
        "vllm.model_executor.models.utils": {
            "AutoWeightsLoader": AutoWeightsLoader,
            "PPMissingLayer": PPMissingLayer,
            "WeightsMapper": WeightsMapper,
            "extract_layer_index": lambda name: next(int(part) for part in name.split(".") if part.isdigit()),
            "make_empty_intermediate_tensors_factory": lambda keys, hidden_size: None,
            "make_layers": make_layers,
            "maybe_prefix": lambda prefix, name: f"{prefix}.{name}" if prefix else name,
        },
        "vllm.sequence": {"IntermediateTensors": IntermediateTensors},
        "vllm.transformers_utils": {},
        "vllm.transformers_utils.model_arch_config_convertor": {
            "MODEL_ARCH_CONFIG_CONVERTORS": registry.convertors,
            "ModelArchConfigConvertorBase": ArchConvertor,
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm_model", "vllm_config"):
        monkeypatch.delitem(sys.modules, f"difftransformer.serving.{name}", raising=False)
    return registry
