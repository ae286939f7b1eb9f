"""Open models from any source, compare a model with its conversion, and export models."""

from .code import write_code
from .drift import measure_drift
from .export import Exported, export_folder
from .opening import OpenedModel, folder_sha256, open_language_model, open_model, open_tokenizer, open_unfilled
from .source import source_folder
