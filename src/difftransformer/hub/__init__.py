"""Open models from any source, and export models."""

from .code import write_code
from .export import Exported, export_folder
from .opening import folder_sha256, open_deferred, open_model, open_tokenizer, source_folder
