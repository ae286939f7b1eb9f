"""Convert models to other layouts and back: folders of language models, and attention weights of released modules."""

from .folder import Converted, convert_folder
from .layouts import LAYOUTS, Layout
from .microsoft import load_microsoft_attention, load_microsoft_state, microsoft_attention_state, microsoft_state
from .motif import load_motif_attention, motif_attention_state
from .phi4flash import load_phi4flash_attention, phi4flash_attention_state
from .upcycle import Upcycled, upcycle_folder
