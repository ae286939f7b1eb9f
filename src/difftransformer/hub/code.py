"""Remote code: a Python file beside a model's weights, which transformers runs if it is called with `trust_remote_code=True`.

The file in `remote_code` is data: this package never imports it, and its own classes open a folder that has it.
"""

import json
import shutil
from pathlib import Path

from ..convert.checkpoint_io import read_config
from ..errors import ConfigError
from ..model import DiffTransformerConfig
from ..model.card import HEADS
from ..model.weights import CONFIG_FILE

FOLDER = Path(__file__).parent / "remote_code"
MODELING = "modeling_difftransformer"
ATTENTION_TYPES = ("softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex")
AUTO_MAP = {
    "AutoConfig": f"{MODELING}.DiffTransformerConfig",
    **{f"AutoModel{head}": f"{MODELING}.DiffTransformer{head or 'Model'}" for head in HEADS},
}


def check_code(config: DiffTransformerConfig) -> None:
    """Check that the remote code can compute a model.

    Raises:
        ConfigError: Its attention type is not one of this package's.
    """
    if config.attention_type not in ATTENTION_TYPES:
        raise ConfigError(
            f"attention_type={config.attention_type!r}: the code that is exported has {', '.join(ATTENTION_TYPES)}; export "
            "without code"
        )


def write_code(folder: Path | str) -> Path:
    """Add remote code to the folder of a saved model of this package, and return its file.

    Raises:
        CheckpointError: The folder holds no configuration of a model.
        ConfigError: The configuration is not one of this package, or its attention type is another one.
    """
    folder = Path(folder)
    document = read_config(folder)
    if document.get("model_type") != DiffTransformerConfig.model_type:
        raise ConfigError(
            f"{folder / CONFIG_FILE}: model_type={document.get('model_type')!r}; code is written for "
            f"{DiffTransformerConfig.model_type!r} alone"
        )
    check_code(DiffTransformerConfig.from_dict(document))
    file = folder / f"{MODELING}.py"
    shutil.copyfile(FOLDER / file.name, file)
    text = json.dumps(document | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return file
