"""Open a saved model from any source (a run, a folder, a GGUF file, or the Hugging Face hub), and its tokenizer."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as TokenizerFile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..data.records import files_sha256
from ..errors import CheckpointError, ConfigError, DiffTransformerError, on_one_line
from ..families import AcceleratedDiffLlamaAttention, DifferentialFields, accelerate
from ..families.checkpoint_io import CARRIED, WeightsReader
from ..files import naming
from ..model import DiffTransformerConfig
from ..model.transformers_errors import FOREIGN_FAULTS, quietly
from ..model.weights import ADAPTER_CONFIG_FILE, CONFIG_FILE, DTYPES, GENERATION_FILE, INDEX_FILE
from ..reading import LARGEST_INT, parse_json
from ..sources import check_model, find_model
from ..train import latest_checkpoint
from ..train.checkpoint import STATE_FILE, is_of_training, verify_checkpoint
from ..train.parallel import DeferredModel
from ..typed import WeightsDtype, short
from .deferred import deferred

HUB_FILES = (
    CONFIG_FILE,
    "*.safetensors",
    INDEX_FILE,
    ADAPTER_CONFIG_FILE,
    *(name for name in CARRIED if not name.endswith(".py")),
)
OTHER_WEIGHTS = ("*/*.safetensors", "consolidated*.safetensors")  # of other programs; `*` matches slashes too
# A Hugging Face folder with a tokenizer has at least one of these files.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
MOST_MISSING = 2  # up to twice the size of its weights a model is built, so that the missing ones can be named
_HASHED_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")


@contextmanager
def source_folder(model: Path | str) -> Iterator[Path]:
    """Provide a model as a folder with config.json and safetensors.

    Args:
        model: Run folder (its newest checkpoint); checkpoint or folder of a saved model; GGUF file, which
            is dequantized to fp32; owner/name on the Hugging Face hub, from where no code and no pickle is fetched; or the
            name of a shipped model.

    Raises:
        CheckpointError: The model is none of these, or cannot be read or fetched.
        ConfigError: A package that reads GGUF files is missing.
    """
    check_model(model)
    path = find_model(model)
    if path.is_dir():
        yield latest_checkpoint(path)
    elif path.is_file():
        with tempfile.TemporaryDirectory() as temporary:
            yield _from_gguf(path, Path(temporary))
    else:
        yield _from_hub(str(model))


def _from_gguf(path: Path, folder: Path) -> Path:
    try:
        import gguf  # noqa: F401 - transformers reads the file with it
        from transformers import GgufConfig
    except ImportError:
        raise ConfigError(f"{path}: reading GGUF files needs two more packages; pip install gguf accelerate") from None
    here: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **here
            )
            # Readers of the folder would take its weights for quantized ones.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **here)
    except FOREIGN_FAULTS as error:
        raise CheckpointError(f"{path}: cannot be read as a GGUF model ({on_one_line(error)})") from error
    with quietly(), naming(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(OTHER_WEIGHTS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and it was not found on the hub ({on_one_line(error)})"
        ) from None


def open_model(
    model: Path | str,
    *,
    dtype: WeightsDtype = "auto",
    backend: str = "auto",
    auto_class: Any = AutoModelForCausalLM,
) -> Any:
    """Open a causal language model, or a model of another Auto class, with complete weights.

    A DiffLlama is accelerated (see `accelerate`).

    Args:
        model: Run folder (its newest checkpoint); checkpoint or folder of any causal language model that
            transformers opens without remote code; .gguf file; or owner/name on the Hugging Face hub.
        dtype: Floating-point type of the weights. "auto" keeps the type that they were saved in.
        backend: Attention backend of a model of this package or of a DiffLlama.
        auto_class: transformers' Auto class of the model.

    Raises:
        CheckpointError: The model is damaged or incomplete, or cannot be opened.
        ConfigError: A backend is given for a model that does not use this package's attention.
    """
    with source_folder(model) as folder, quietly():
        if (folder / STATE_FILE).exists():
            verify_checkpoint(folder)
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        with _named(folder):
            config = AutoConfig.from_pretrained(folder, **local)
            is_ours = isinstance(config, (DiffTransformerConfig, DifferentialFields))
            if is_ours and backend != "auto":
                config.attn_backend = backend
            elif backend != "auto" and config.model_type != "diffllama":
                raise ConfigError(
                    f"--backend {backend}: {folder} holds a {config.model_type!r} model, which does not use this package's "
                    "attention; omit --backend"
                )
            with WeightsReader(folder) as weights:  # refuses pickles, names damaged files
                _check_size(config, weights, auto_class)
                network, loading = auto_class.from_pretrained(
                    folder,
                    config=config,
                    dtype="auto" if dtype == "auto" else DTYPES[dtype],
                    output_loading_info=True,
                    use_safetensors=True,
                    **local,
                )
    _check_special_tokens(network, folder)
    for problem in ("missing", "unexpected") if is_ours else ("missing",):
        if names := loading[f"{problem}_keys"]:
            raise CheckpointError(f"{folder}: {problem} weight {min(names)}; save the model again")
    if config.model_type == "diffllama":
        for layer in accelerate(network).modules():
            if isinstance(layer, AcceleratedDiffLlamaAttention):
                layer.backend = backend
    return network


@contextmanager
def open_deferred(
    model: Path | str, adapt: Callable[[Any], Any] = lambda own: own, *, verify: bool = True
) -> Iterator[DeferredModel]:
    """Open a model of this package or of `families` in fp32, to be divided. Filling it reads this process's part alone.

    Args:
        model: See `open_model`.
        adapt: Returns the configuration to build it by, from its own. Parameters have the same names and shapes.
        verify: Whether to compare the files of a checkpoint with their sums, which reads all of them.

    Raises:
        CheckpointError: The model is damaged, incomplete or of another type, or cannot be opened.
        ConfigError: Its weights are quantized or adapters, or one that `adapt` raises.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(source_folder(model))
        if verify and (folder / STATE_FILE).exists():
            verify_checkpoint(folder)
        with quietly(), _named(folder):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            weights = stack.enter_context(WeightsReader(folder))
            _check_size(config, weights, AutoModelForCausalLM)
            start = deferred(adapt(config), weights)
            if (folder / GENERATION_FILE).is_file():
                start.network.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        _check_special_tokens(start.network, folder)
        yield start


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Name the folder in what other packages raise about it."""
    try:
        yield
    except DiffTransformerError:
        raise
    except FOREIGN_FAULTS as error:
        raise CheckpointError(f"{folder}: cannot be opened as a language model ({on_one_line(error)})") from error


def _check_special_tokens(network: Any, folder: Path) -> None:
    """Refuse special tokens that are not token ids, in config.json and generation_config.json."""
    for settings in (network.config, getattr(network, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(settings, name, None)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if any(one is not None and (type(one) is not int or abs(one) > LARGEST_INT) for one in ids):
                raise CheckpointError(f"{folder}: {name}={short(value)} is not a token id; correct its settings")


def _check_size(config: Any, weights: WeightsReader, auto_class: Any) -> None:
    """Refuse a configuration that describes more than the weights hold, before a network of that size is built."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    layers, tensors = getattr(config.get_text_config(), "num_hidden_layers", 0), len(weights.shapes)
    if layers > tensors:
        raise ValueError(f"config.json describes {layers} layers, and the weights hold {tensors} tensors")
    if (packed := getattr(config, "quantization_config", None)) is not None:
        method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
        bits = isinstance(packed, dict) and (packed.get("load_in_8bit") or packed.get("load_in_4bit"))
        if not bits and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # which transformers would pass over
            raise ValueError(
                f"the quant_method of its quantization_config is {short(method)}; transformers knows "
                f"{', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}"
            )
        return
    with torch.device("meta"):
        described = sum(parameter.numel() for parameter in auto_class.from_config(config).parameters())
    held = sum(math.prod(shape) for shape in weights.shapes.values())
    if described > MOST_MISSING * held:
        raise ValueError(f"config.json describes {described:,} parameters, and the weights hold {held:,}")


def folder_sha256(folder: Path) -> str:
    """Return the fingerprint of a saved model: of its configuration, weights and tokenizer files.

    Files of a checkpoint that only training reads are left out.
    """
    return files_sha256(
        path
        for path in folder.iterdir()
        if path.suffix in _HASHED_SUFFIXES and not is_of_training(path.name) and path.is_file()
    )


def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a saved model as transformers opens it.

    Raises:
        CheckpointError: There is none, or it cannot be opened.
    """
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise CheckpointError(f"{folder}: no tokenizer here; save the model's tokenizer into the folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception
        reason = on_one_line(error)
        raise CheckpointError(
            f"{_damaged_file(folder) or folder}: its tokenizer cannot be opened ({reason})"
        ) from error


def _damaged_file(folder: Path) -> Path | None:
    """Return the file of a tokenizer that cannot be read by itself, if there is one."""
    for path in sorted(folder.glob("*.json")):
        try:
            if path.name == "tokenizer.json":
                TokenizerFile.from_file(str(path))
            elif path.name in TOKENIZER_SETTINGS:
                parse_json(path.read_bytes())
        except (
            Exception
        ):  # of any class: tokenizers raises Exception itself. The tokenizer was refused already, this names the file
            return path
    return None
