"""What the differential variants share: forms of lambda, the headwise norm, and the call of the op.

A variant sets the default of each `DifferentialOptions` field, and how many heads of the Transformer make one of its heads.
V1 and V2 differ in four choices (own or shared keys, norm or none, lambda by layer or by token, a value of 2 D or D). Each
choice is an option of its own.

`lambda_init` is two numbers in the paper: the constant term of lambda (eq. 2), and 1 minus the factor after the norm (eq. 3).
`lambda_value` and `head_scale` set one of them and leave the other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops.problem import LOW_PRECISION
from .base import QK_NORM_EPS, REPLICATED, AttentionConfig, HeadLayout, Option, PlainLayer, head_width
from .head_norm import HEAD_NORM_EPS, HeadNorm, NormedAttention, check_head_scale

LambdaForm = Literal["layer", "head", "scalar", "token", "constant"]

LAMBDA_STD = 0.1  # standard deviation of the initial lambda vectors (the paper's code)
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
LAMBDA_OFFSET = "lambda_offset"


def lambda_init(layer_index: int) -> float:
    """Return 0.8 - 0.6 exp(-0.3 layer_index), layers counted from 0 (arXiv:2410.05258 section 2.1: l = layer_index + 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


@dataclass(frozen=True, kw_only=True)
class DifferentialOptions:
    """Options of differential layers; None takes the variant's default.

    Attributes:
        lambda_form: "layer", one number for the layer by eq. 2; "head", the same with vectors for each head; "scalar", a
            learned number for the layer plus the constant term, without exponentials; "token", the sigmoid of a projection of
            the hidden states, one number for each token and head (DIFF V2); "constant", the constant term alone.
        lambda_init: The constant term of eq. 2, and 1 minus the factor after the norm; None means the paper's schedule by
            depth.
        lambda_value: The constant term alone, of any sign; None means lambda_init. 1 subtracts the whole second map, 0 leaves
            it out, and negative numbers add it.
        head_norm: "gain", a headwise RMSNorm with one learned gain; "plain", the same without the gain; "none".
        head_scale: The factor of each head alone; None means 1 - lambda_init after a norm, and 1 without one.
        shared_key: Whether both maps read one key.
    """

    lambda_form: LambdaForm | None = None
    lambda_init: float | None = None
    lambda_value: float | None = None
    head_norm: HeadNorm | None = None
    head_scale: float | None = None
    shared_key: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("lambda_form", get_args(LambdaForm)), ("head_norm", get_args(HeadNorm))):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
        for name in ("lambda_init", "lambda_value"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{name}={value}: give a finite number")
        if self.lambda_form == "token" and self.lambda_value is not None:
            raise ConfigError(
                f"lambda_value={self.lambda_value} with lambda_form='token': the sigmoid of a projection has no constant "
                "term; leave lambda_value out, the variant's default included, or use another lambda_form"
            )
        if self.head_norm in ("gain", "plain") and self.lambda_init == 1 and self.head_scale is None:
            raise ConfigError(
                "lambda_init=1 with a headwise norm gives heads of zero, since the norm is followed by (1 - lambda_init); "
                "use head_norm='none' or another lambda_init, or set head_scale"
            )
        if self.head_scale is not None:
            check_head_scale(self.head_scale)

    def over(self, defaults: "DifferentialOptions") -> "DifferentialOptions":
        """Return a copy with the defaults in place of None."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return DifferentialOptions(
            **{name: getattr(defaults, name) if value is None else value for name, value in chosen.items()}
        )

    def constants(self, layer_index: int) -> tuple[float, float]:
        """Return a layer's constant term of lambda and factor of each head. All other options must be set."""
        init = lambda_init(layer_index) if self.lambda_init is None else self.lambda_init
        scale = self.head_scale
        if scale is None:
            scale = 1.0 if self.head_norm == "none" else 1.0 - init
        return init if self.lambda_value is None else self.lambda_value, scale


V1 = DifferentialOptions(lambda_form="layer", head_norm="gain", shared_key=False)
V2 = DifferentialOptions(lambda_form="token", head_norm="none", shared_key=True)


class Differential(NormedAttention):
    """Base of the differential variants (arXiv:2410.05258 eq. 1-3): head = norm((A1 - lambda A2) V).

    Rows of q_proj and, with own keys, of k_proj are ordered (head, map, D). In grouped-query attention each map keeps its own
    key. Lambda vectors stay in fp32 whatever dtype the module is cast to: in bf16 the rounding of their dot products would be
    as large as the changes that they learn.

    A model's configuration may set num_differential_heads and num_differential_key_value_heads, where they do not follow from
    the Transformer's heads, and value_head_dim, head_norm_eps and the fields of `DifferentialOptions`.

    Takes the arguments of `DifferentialAttention` and of the variant's `heads`. head_dim None means
    embed_dim / (H twin_heads), and value_head_dim None means twin_heads D.
    """

    config_options: ClassVar[dict[str, Option]] = {
        "num_differential_heads": Option(int | None),
        "num_differential_key_value_heads": Option(int | None),
        "value_head_dim": Option(int | None),
        "lambda_form": Option(str | None),
        "lambda_init": Option(float | None),
        "lambda_value": Option(float | None),
        "head_norm": Option(str | None),
        "head_scale": Option(float | None),
        "shared_key": Option(bool | None),
        "head_norm_eps": Option(float, HEAD_NORM_EPS),
    }
    fp32_parameters: ClassVar[tuple[str, ...]] = (*LAMBDA_VECTORS, LAMBDA_OFFSET)

    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor
    lambda_offset: Tensor
    lambda_value: Tensor
    defaults: ClassVar[DifferentialOptions]
    twin_heads: ClassVar[int]  # heads of the same-size Transformer that one differential head stands for

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        layer_index: int = 0,
        head_norm_eps: float = HEAD_NORM_EPS,
        backend: str = "auto",
        options: DifferentialOptions | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = QK_NORM_EPS,
        **more: Any,
    ) -> None:
        chosen = (options or DifferentialOptions()).over(self.defaults)
        widths = {"head_dim": head_dim, "value_head_dim": value_head_dim}
        layout = self.heads(chosen, embed_dim, num_heads, num_key_value_heads, **widths, **more)
        norms: dict[str, Any] = {"qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps}
        super().__init__(embed_dim, layout, layer_index=layer_index, backend=backend, **norms)
        self.options = chosen
        self.lambda_init = lambda_init(layer_index) if chosen.lambda_init is None else chosen.lambda_init
        value, scale = chosen.constants(layer_index)
        self.add_constants(lambda_value=value)
        wide = torch.float32 if self.kept_in_fp32() else None
        if chosen.lambda_form in ("layer", "head"):
            shape = (layout.head_dim,) if chosen.lambda_form == "layer" else (num_heads, layout.head_dim)
            for name in LAMBDA_VECTORS:
                setattr(self, name, nn.Parameter(torch.empty(shape, dtype=wide)))
        elif chosen.lambda_form == "scalar":
            # Not of 0 dimensions, which FSDP cannot shard.
            self.lambda_offset = nn.Parameter(torch.empty(1, dtype=wide))
        elif chosen.lambda_form == "token":
            self.lambda_proj = nn.Linear(embed_dim, num_heads, bias=False)
        self.add_head_norm(chosen.head_norm or "none", eps=head_norm_eps, scale=scale)
        self.init_own_parameters()

    @classmethod
    def options_of(cls, config: AttentionConfig) -> DifferentialOptions:
        """Return the options of a configuration, with the variant's defaults where it sets none."""
        chosen = {field.name: cls.option(config, field.name) for field in fields(DifferentialOptions)}
        return DifferentialOptions(**chosen).over(cls.defaults)

    @classmethod
    def heads(
        cls,
        options: DifferentialOptions,
        embed_dim: int,
        num_heads: int,
        groups: int | None,
        *,
        head_dim: int | None,
        value_head_dim: int | None,
    ) -> HeadLayout:
        """Return the layout of H heads and G key/value heads, None as in the constructor's arguments."""
        head_dim = head_dim or head_width(embed_dim, num_heads, cls.twin_heads)
        return HeadLayout(
            num_heads=num_heads,
            num_key_value_heads=groups or num_heads,
            head_dim=head_dim,
            query_maps=2,
            key_maps=1 if options.shared_key else 2,
            value_head_dim=value_head_dim or cls.twin_heads * head_dim,
        )

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Turn every `twin_heads` heads of the Transformer into one differential head, unless the configuration says otherwise.

        Raises:
            ConfigError: an odd number of heads, or a head_dim that is already halved.
        """
        heads = cls.option(config, "num_differential_heads") or cls._share(config, "num_attention_heads")
        groups = cls.option(config, "num_differential_key_value_heads") or cls._share(config, "num_key_value_heads")
        widths = {"head_dim": config.head_dim, "value_head_dim": cls.option(config, "value_head_dim")}
        return cls.heads(cls.options_of(config), config.hidden_size, heads, groups, **widths)

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Pass the width of values, the norm's eps and the chosen options."""
        return {
            "value_head_dim": cls.layout_of(config).value_head_dim,
            "head_norm_eps": cls.option(config, "head_norm_eps"),
            "options": cls.options_of(config),
        }

    @classmethod
    def own_parameters(cls, config: AttentionConfig) -> int:
        """Count the parameters of lambda and the gain of the norm."""
        options, layout = cls.options_of(config), cls.layout_of(config)
        lambdas = {
            "layer": 4 * layout.head_dim,
            "head": 4 * layout.num_heads * layout.head_dim,
            "scalar": 1,
            "token": layout.num_heads * config.hidden_size,
            "constant": 0,
        }
        return lambdas[options.lambda_form or "layer"] + (layout.value_head_dim if options.head_norm == "gain" else 0)

    @classmethod
    def upcycled_options(cls, config: AttentionConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Keep every head, with a value of D and without a norm, and start at lambda 0, or at 1/2 where it is a sigmoid.

        A headwise norm would discard the size of each row, which a pretrained W_O has learned to read.
        """
        return {
            "num_differential_heads": config.num_attention_heads,
            "num_differential_key_value_heads": config.num_key_value_heads,
            "value_head_dim": config.head_dim,
            "head_norm": "none",
            "head_scale": None,
            "lambda_init": 0.0,
            "lambda_value": None,
        }

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Give both maps the Transformer's queries and keys, and make the exponents of lambda equal, so that they cancel.

        Where lambda is sigmoid(0) = 1/2, W_O doubles.
        """
        options, config = cls.options_of(plain.config), plain.config
        if name == "q_proj.weight":
            return plain.twice(name, config.num_attention_heads)
        if name == "k_proj.weight" and not options.shared_key:
            return plain.twice(name, config.num_key_value_heads)
        if name == "o_proj.weight" and options.lambda_form == "token":
            return 2 * plain.read(name)
        if name == "lambda_proj.weight":
            return plain.zeros(shape)
        if name in LAMBDA_VECTORS:
            return plain.normal(name[:-1], shape, LAMBDA_STD)  # one draw for lambda_q1 and lambda_q2
        if name == LAMBDA_OFFSET:
            return torch.zeros(shape)
        return plain.read(name)

    @classmethod
    def tensor_parallel(cls, config: AttentionConfig) -> dict[str, str]:
        """Split lambda's projection too; every process holds the gain of the norm."""
        options = cls.options_of(config)
        plan = super().tensor_parallel(config)
        if options.lambda_form == "token":
            plan["lambda_proj"] = "colwise"
        if options.head_norm == "gain":
            plan["head_norm"] = REPLICATED
        return plan

    @classmethod
    def _share(cls, config: AttentionConfig, field: str) -> int:
        count = getattr(config, field)
        if cls.twin_heads == 1:
            return int(count)
        if count % 2:
            raise ConfigError(
                f"{field}={count} is odd: attention_type={cls.name!r} makes one differential head of two heads of the "
                "same-size Transformer; use an even number, or set num_differential_heads and num_differential_key_value_heads"
            )
        if 2 * config.head_dim * config.num_attention_heads == config.hidden_size:
            raise ConfigError(
                f"head_dim={config.head_dim} is half of hidden_size / num_attention_heads = "
                f"{config.hidden_size // config.num_attention_heads}: head_dim describes the same-size Transformer and is "
                "also the width of each differential map, so it must not be halved; set num_differential_heads to keep it"
            )
        return int(count // 2)

    def init_own_parameters(self, normal_: Any = nn.init.normal_) -> None:
        """Draw the lambda vectors from N(0, LAMBDA_STD^2), and let lambda_offset be 0."""
        for name, tensor in self._own_parameters(self.fp32_parameters).items():
            normal_(tensor, mean=0.0, std=0.0 if name == LAMBDA_OFFSET else LAMBDA_STD)

    def lam(self) -> Tensor | None:
        """Return the current lambda (arXiv:2410.05258 eq. 2), 0-dim or (H,), fp32 or float64; None with one for each token."""
        form = self.options.lambda_form
        if form == "token":
            return None
        if form == "constant":
            return self.constant("lambda_value", self.q_proj.weight)
        if form == "scalar":
            offset = self.lambda_offset
            return (offset.float() if offset.dtype in LOW_PRECISION else offset).sum() + self.constant(
                "lambda_value", offset
            )
        # As few calls as possible: they count in a decoding step of a small model.
        q1, k1, q2, k2 = self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2
        if q1.dtype in LOW_PRECISION:
            q1, k1, q2, k2 = q1.float(), k1.float(), q2.float(), k2.float()
        # Not q1.dot(k1): its last bit depends on the memory addresses of the vectors.
        return (q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp() + self.constant("lambda_value", q1)

    def head_lam(self, hidden: Tensor) -> Tensor:
        """Return `lam()`, or lambda for each token, (B, H, T)."""
        if self.options.lambda_form == "token":
            projected = self.lambda_proj(hidden).transpose(1, 2)
            return torch.sigmoid(projected.float() if projected.dtype in LOW_PRECISION else projected)
        lam = self.lam()
        assert lam is not None
        return lam

    def _own_parameters(self, names: tuple[str, ...]) -> dict[str, nn.Parameter]:
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(bfloat16)` reaches parameters here; the lambdas follow to another device but are never narrowed below fp32.
        names = self.kept_in_fp32()
        before = [tensor.detach() for tensor in self._own_parameters(names).values()]
        super()._apply(fn, recurse)
        for vector, kept in zip(self._own_parameters(names).values(), before, strict=True):
            if vector.dtype in LOW_PRECISION:
                vector.data = kept.to(vector.device, torch.float32)
                if vector.grad is not None:
                    vector.grad = vector.grad.to(torch.float32)
        return self
