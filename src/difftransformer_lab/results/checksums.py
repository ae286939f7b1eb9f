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
    body_bytes = max(0, len(content) - len(_end(b"")))
    body, end = content[:body_bytes], content[body_bytes:]
    expected = _end(body)
    # In a damaged end either the name or the digits are still there.
    digits = expected.split(b'"')[-2]
    has_name = isinstance(document, dict) and "sha256" in document
    if end != expected and (has_name or digits in end):
        raise ValueError("the sha256 at its end belongs to another content")
    if has_name:
        del document["sha256"]
    return document


def _end(body: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
