"""Text, tokenizers, shards, the loader and needle documents. This layer does not know models.

Names are imported on first use, so importing the package loads neither torch nor tokenizers.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .config import DataConfig
    from .documents import Document, Example
    from .loader import Batch, Loader, check_context_stages, document_positions, validation_rows, validation_windows
    from .needles import (
        CITIES_SEEN,
        CITIES_UNSEEN,
        NeedleQuestion,
        RetrievalMix,
        answer_tokens,
        evaluation_document,
        needle_document_tokens,
        needle_questions,
        training_document,
    )
    from .prepare import prepare_shards
    from .shards import Manifest, Shards, SourceConfig, TokenStream
    from .text import iter_documents, read_documents
    from .tokenizer import Tokenizer, byte_tokenizer, id_tokenizer, load_tokenizer, train_bpe

__getattr__, __dir__, __all__ = lazy_names(__name__)
