"""Conversion of models from and to other layouts: folders of language models, and weights of public attention modules."""

from .checkpoint_io import Converted, convert_folder
from .microsoft import load_microsoft_attention, load_microsoft_state, microsoft_attention_state, microsoft_state
from .motif import load_motif_attention, motif_attention_state
from .phi4flash import load_phi4flash_attention, phi4flash_attention_state
from .registry import LAYOUTS, Layout
from .upcycle import Upcycled, upcycle_folder
