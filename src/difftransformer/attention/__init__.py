"""Attention variants behind one contract. A variant is one file here and one line of `VARIANTS`.

A variant outside this package registers itself: call `register(MyAttention)` before a model is built or opened. For the
command line, and for the processes that a study starts, name it in the environment, several with commas:
DIFFTRANSFORMER_VARIANTS=my_package.my_module:MyAttention. A model's files never name code to import.
"""

import importlib
import os
from typing import ClassVar, get_origin

from ..errors import ConfigError
from .base import Attention, AttentionConfig, HeadLayout, KeyValueCache, Option, PlainLayer, RMSNorm
from .causality import Causality, check_causality
from .dex import DifferentialExtension
from .diff import DifferentialAttention
from .diff_gate import GatedDifferentialAttention
from .diff_v2 import DifferentialAttentionV2
from .diff_v2_added import AddedDifferentialAttentionV2
from .diff_xsa import ExclusiveDifferentialAttention
from .differential import DifferentialOptions
from .gate import GatedAttention
from .grouped_diff import GroupedDifferentialAttention, GroupedLayout
from .grouped_diff_v2 import GroupedDifferentialAttentionV2
from .softmax import SoftmaxAttention
from .softmax_norm import NormedSoftmaxAttention
from .xsa import ExclusiveSelfAttention

VARIANTS: dict[str, type[Attention]] = {
    "softmax": SoftmaxAttention,
    "diff": DifferentialAttention,
    "diff_v2": DifferentialAttentionV2,
    "grouped_diff": GroupedDifferentialAttention,
    "grouped_diff_v2": GroupedDifferentialAttentionV2,
    "dex": DifferentialExtension,
    "softmax_norm": NormedSoftmaxAttention,
    "xsa": ExclusiveSelfAttention,
    "gate": GatedAttention,
    "diff_xsa": ExclusiveDifferentialAttention,
    "diff_gate": GatedDifferentialAttention,
    "diff_v2_added": AddedDifferentialAttentionV2,
}
VARIABLE = "DIFFTRANSFORMER_VARIANTS"
_unregistered = os.environ.get(VARIABLE, "").replace(" ", "").split(",") if os.environ.get(VARIABLE) else []


def variants() -> dict[str, type[Attention]]:
    """Return the table of variants, with those that the environment names.

    Raises:
        ConfigError: the environment names a class that cannot be imported.
    """
    # Not when this module is imported: a variant's module may import the whole package.
    while _unregistered:
        place = _unregistered.pop()
        module, _, name = place.partition(":")
        try:
            register(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{VARIABLE}={place}: {error}; give module:Class") from None
    return VARIANTS


def variant(attention_type: str) -> type[Attention]:
    """Return the class of an attention type.

    Raises:
        ConfigError: there is no such variant.
    """
    if attention_type not in variants():
        raise ConfigError(
            f"attention_type={attention_type!r} is unknown; choose one of {', '.join(VARIANTS)}, or register another "
            f"(the variable {VARIABLE} or difftransformer.attention.register)"
        )
    return VARIANTS[attention_type]


def register(cls: type[Attention]) -> type[Attention]:
    """Add a variant to the table under its `name`. Can be used as a decorator.

    Raises:
        ConfigError: the class lacks a constant that its bases declare, or another variant has that name, or an option of the
            same name with another type or default.
    """
    constants = {
        name
        for one in cls.__mro__
        for name, kind in vars(one).get("__annotations__", {}).items()
        if get_origin(kind) is ClassVar
    }
    if missing := sorted(name for name in constants if not hasattr(cls, name)):
        raise ConfigError(f"{cls.__name__} has no {', '.join(missing)}; a variant sets them in its class")
    if VARIANTS.get(cls.name, cls) is not cls:
        raise ConfigError(f"attention_type={cls.name!r} is already {VARIANTS[cls.name].__name__}; use another name")
    known = config_options()
    for name, option in cls.config_options.items():
        if known.get(name, option) != option:
            raise ConfigError(f"{cls.__name__}: another variant has an option {name} that differs; use another name")
    VARIANTS[cls.name] = cls
    return cls


def config_options() -> dict[str, Option]:
    """Return the options of all variants, which are fields of every model's configuration."""
    return {name: option for cls in variants().values() for name, option in cls.config_options.items()}


def label(attention_type: str) -> str:
    """Return the name of an attention type in reports; an unknown one is its own label."""
    return VARIANTS[attention_type].label if attention_type in variants() else attention_type
