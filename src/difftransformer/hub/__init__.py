"""Open models from any source, and export models."""

from .code import write_code
from .export import Exported, export_folder
from .opening import folder_sha256, open_model, open_tokenizer, open_unfilled
from .source import source_folder
