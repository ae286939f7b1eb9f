"""Every road of other people's models: converted, made differential, or run on this package's operator.

* `convert_folder` moves models between layouts; the functions for attention weights convert single layers.
* `upcycle_folder` makes a pretrained model differential without changing its function. A model of another layout than Llama's
  keeps its own class, and only its attention changes (`FAMILIES`).
* `accelerate` runs the attention of transformers' DiffLlama on this package's operator, and `restore` undoes it.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .acceleration import AcceleratedDiffLlamaAttention, accelerate, restore
    from .checkpoint_io import Converted, convert_folder
    from .conversion import LAYOUTS, Layout
    from .microsoft import load_microsoft_attention, load_microsoft_state, microsoft_attention_state, microsoft_state
    from .models import (
        DifferentialFamilyConfig,
        DifferentialFields,
        attention_fields,
        attention_layers,
        count_family,
        family_config,
    )
    from .motif import load_motif_attention, motif_attention_state
    from .phi4flash import load_phi4flash_attention, phi4flash_attention_state
    from .table import FAMILIES, REFUSED
    from .timm import load_timm_attention, timm_attention_state
    from .upcycle import Upcycled, upcycle_folder

__getattr__, __dir__, __all__ = lazy_names(__name__)
