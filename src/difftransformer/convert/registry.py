"""The table of layouts. A layout is one file of this package and one line here."""

from typing import NamedTuple


class Layout(NamedTuple):
    """A layout of weights.

    Attributes:
        summary: What it is, in a few words.
        model_type: The model_type in config.json, or None if the layout has no folders of its own.
        functions: Names in `difftransformer.convert` that convert attention weights; empty if whole folders are converted.
    """

    summary: str
    model_type: str | None
    functions: tuple[str, ...] = ()


LAYOUTS: dict[str, Layout] = {
    "difftransformer": Layout("models of this package", "difftransformer"),
    "diffllama": Layout("DiffLlama of transformers", "diffllama"),
    "llama": Layout("Llama of transformers, for softmax twins", "llama"),
    "microsoft": Layout(
        "attention modules of microsoft/unilm, V1 and V2",
        None,
        ("microsoft_attention_state", "load_microsoft_attention", "microsoft_state", "load_microsoft_state"),
    ),
    "phi4flash": Layout(
        "attention of Phi-4-mini-flash", "phi4flash", ("phi4flash_attention_state", "load_phi4flash_attention")
    ),
    "motif": Layout(
        "attention of Motif-2.6B and Motif-2-12.7B", "Motif", ("motif_attention_state", "load_motif_attention")
    ),
}
FOLDER_LAYOUTS = [name for name, layout in LAYOUTS.items() if not layout.functions]
