"""Conversion of models from and to other layouts: folders of language models, and weights of public attention modules.

Names are resolved on first use, so that importing the table of layouts loads neither torch nor transformers.
"""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".checkpoint_io": ("Converted", "convert_folder"),
        ".microsoft": (
            "load_microsoft_attention",
            "load_microsoft_state",
            "microsoft_attention_state",
            "microsoft_state",
        ),
        ".motif": ("load_motif_attention", "motif_attention_state"),
        ".registry": ("LAYOUTS", "Layout"),
        ".source": ("source_folder",),
        ".upcycle": ("Upcycled", "measure_drift", "upcycle_folder"),
        ".phi4flash": ("load_phi4flash_attention", "phi4flash_attention_state"),
    },
)
