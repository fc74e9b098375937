"""What an archive of caches is, in a small JSON file beside it. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
import re
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.entry import check_path
from entrypoint.errors import ManifestError

MAX_LABEL_BYTES: Final = 64 * 1024
_SCHEMA: Final = 1
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MOST: Final = 1 << 53


class Label(NamedTuple):
    """Caches of a checkpoint, and the file that they are in; sizes in bytes.

    `path` is where the checkpoint lay: vLLM finds what it compiled by that. `unpacked` is what its
    `entries` files hold together.
    """

    checkpoint: str
    key: str
    platform: str
    path: str
    archive: str
    size: int
    blake3: str
    entries: int
    unpacked: int

    def encode(self) -> bytes:
        """Return the bytes of the label."""
        return canonical({"schema": _SCHEMA, **self._asdict()}) + b"\n"


def decode(data: bytes) -> Label:
    """Read what may be anybody's bytes. Raises: ManifestError naming the field."""
    try:
        document: Json = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.keys() != {"schema", *Label._fields}:
        raise ManifestError(f"expected an object with schema, {', '.join(Label._fields)}")
    if document.pop("schema") != _SCHEMA:
        raise ManifestError(f"schema: expected {_SCHEMA}")
    for name, value in document.items():
        if not _is_right(name, value):
            raise ManifestError(f"{name}: unexpected value {str(value)[:80]!r}")
    label = Label(**document)  # type: ignore[arg-type]
    check_path(label.archive, "archive")
    return label


def _is_right(name: str, value: Json) -> bool:
    if name in ("size", "entries", "unpacked"):
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
    if not isinstance(value, str) or len(value) > 4096:  # noqa: PLR2004 - PATH_MAX
        return False
    if name in ("key", "blake3"):
        return _DIGEST.fullmatch(value) is not None
    return name == "path" or "/" not in value
