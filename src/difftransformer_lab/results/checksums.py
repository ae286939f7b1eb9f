"""A checksum at the end of a file of JSON, so that a byte that changed on disk is found when the file is read.

The last field is `sha256`, of the bytes of the file before that field. A file without it is read as it is.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from difftransformer.reading import parse_json


def sealed(document: Mapping[str, Any], *, is_short: bool = False) -> str:
    """Return a document, which is not empty, as JSON with its checksum; `is_short` leaves out indentation."""
    body = json.dumps(document, indent=None if is_short else 1, allow_nan=False).removesuffix("}").removesuffix("\n")
    return body + _end(body.encode()).decode()


def opened(content: bytes) -> Any:
    """Read JSON that `sealed` returned, or that has no checksum.

    Raises:
        ValueError: It is not JSON, or has another checksum.
    """
    document = parse_json(content)
    if isinstance(document, dict) and document.pop("sha256", None) is not None:
        body = content[: -len(_end(b""))]
        if content != body + _end(body):
            raise ValueError("the sha256 at its end belongs to another content")
    return document


def _end(body: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
