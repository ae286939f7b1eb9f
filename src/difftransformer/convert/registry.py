"""The table of layouts. A layout is one file of this package and one line here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a layout is.

    Attributes:
        summary: In a few words.
        model_type: What its folders say in config.json.
        folders: Whether whole folders are converted; otherwise `functions` convert attention weights.
        functions: Of `difftransformer.convert`.
    """

    summary: str
    model_type: str | None
    folders: bool
    functions: tuple[str, ...]


LAYOUTS: dict[str, Layout] = {
    "difftransformer": Layout(
        summary="models of this package",
        model_type="difftransformer",
        folders=True,
        functions=("convert_folder",),
    ),
    "diffllama": Layout(
        summary="DiffLlama of transformers",
        model_type="diffllama",
        folders=True,
        functions=("convert_folder",),
    ),
    "microsoft": Layout(
        summary="attention modules of microsoft/unilm, V1 and V2",
        model_type=None,
        folders=False,
        functions=(
            "microsoft_attention_state",
            "load_microsoft_attention",
            "microsoft_state",
            "load_microsoft_state",
        ),
    ),
    "phi4flash": Layout(
        summary="attention of Phi-4-mini-flash",
        model_type="phi4flash",
        folders=False,
        functions=("phi4flash_attention_state", "load_phi4flash_attention"),
    ),
    "motif": Layout(
        summary="attention of Motif-2.6B and Motif-2-12.7B",
        model_type="Motif",
        folders=False,
        functions=("motif_attention_state", "load_motif_attention"),
    ),
}
