"""Remote code: Python files beside a model's weights, which transformers runs if it is called with `trust_remote_code=True`.

They are modules of this package. transformers reads one folder alone, so `ops/problem.py` becomes `ops_problem.py` there, and
relative imports name the files beside. The backends are those of `plain_backends.py`. This package never runs such files: its
own classes open a folder that has them.
"""

import ast
import json
from pathlib import Path

from .._version import __version__
from ..attention import VARIANTS
from ..errors import ConfigError
from ..families.checkpoint_io import read_config
from ..model import DiffTransformerConfig
from ..model.heads import MODELS
from ..model.weights import CONFIG_FILE

PACKAGE = Path(__file__).parent.parent
ENTRY = "modeling_difftransformer"
REPLACED = {"ops.backends": "hub.plain_backends"}
ATTENTION_TYPES = tuple(
    name for name, kind in VARIANTS.items() if kind.__module__.startswith("difftransformer.attention.")
)
AUTO_MAP = {
    "AutoConfig": f"{ENTRY}.{DiffTransformerConfig.__name__}",
    **{auto: f"{ENTRY}.{model.__name__}" for auto, model in MODELS.items()},
}
HEADER = f"# From difftransformer {__version__} (MIT License)"
ENTRY_CODE = f"""\"\"\"A Differential Transformer (arXiv:2410.05258) that needs torch and transformers (5.17 or newer) alone.

From difftransformer {__version__} (MIT License), whose modules are the files beside this one; model_modeling.py is the one to
read first. Attention runs on scaled_dot_product_attention, or on plain matrix products. The package opens the same folder with
fused kernels, and trains such models.
\"\"\"

from .model_config import DiffTransformerConfig
from .model_heads import MODELS
from .model_registration import register_models

# transformers saves the file of a class's module, and the files that it imports.
for _auto, _class in {{"AutoConfig": DiffTransformerConfig, **MODELS}}.items():
    globals()[_class.__name__] = _class
    _class.__module__, _class._auto_class = __name__, _auto
register_models(DiffTransformerConfig, MODELS, key=DiffTransformerConfig.model_type)
"""


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


def write_code(folder: Path | str) -> list[Path]:
    """Add remote code to the folder of a saved model of this package, and return its files.

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
    files = []
    for name, text in code_files().items():
        files.append(folder / name)
        files[-1].write_text(text, encoding="utf-8")
    text = json.dumps(document | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return files


def code_files() -> dict[str, str]:
    """Return the text of every file of the remote code by its name: an entry, and the modules that it needs."""
    files, waiting = {f"{ENTRY}.py": ENTRY_CODE}, ["model.config", "model.heads", "model.registration"]
    while waiting:
        module = waiting.pop()
        if _file_name(module) not in files:
            files[_file_name(module)], needed = _flattened(module)
            waiting += needed
    return files


def _file_name(module: str) -> str:
    return f"{module.replace('.', '_')}.py"


def _flattened(module: str) -> tuple[str, list[str]]:
    """Return a module's text with relative imports of files in one folder, and the modules that it imports."""
    path = _path(REPLACED.get(module, module))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    package, needed = path.relative_to(PACKAGE).parent.parts, []
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            if node.module is None:
                raise ValueError(
                    f"{path}:{node.lineno}: write `from .module import name`, the form that transformers reads"
                )
            names = ", ".join(ast.unparse(alias) for alias in node.names)
            line = f"{' ' * node.col_offset}from .{_file_name(module).removesuffix('.py')} import {names}\n"
            lines[node.lineno - 1 : node.end_lineno] = [line] + [""] * ((node.end_lineno or 0) - node.lineno)
            needed.append(module)
    return f"{HEADER}: {path.relative_to(PACKAGE.parent).as_posix()}\n{''.join(lines)}", needed


def _path(module: str) -> Path:
    path = PACKAGE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
