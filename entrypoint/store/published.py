"""What an object store holds under a published name: two lines. Pure.

    {"files": "NAME/shardboot-NONCE"}       below which prefix the files lie
    {"blake3": …}                           the manifest, byte for byte

One object, so that a name is there with its files or not at all.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from entrypoint.checkpoint.digest import canonical
from entrypoint.checkpoint.entry import check_path
from entrypoint.checkpoint.manifest import MAX_MANIFEST_BYTES
from entrypoint.errors import ManifestError

NONCE = re.compile(r"shardboot-[0-9a-f]{16}")
"""What every push calls its prefix, so that a sweep takes nothing that is not ours."""

_MAX_LINE = 1024
MAX_BYTES = MAX_MANIFEST_BYTES + _MAX_LINE


class Published(NamedTuple):
    """Where the files of a checkpoint lie, and its manifest's bytes, unchecked."""

    files: str
    manifest: bytes

    def encode(self) -> bytes:
        """Return the bytes of the object."""
        return canonical({"files": self.files}) + b"\n" + self.manifest


def decode(data: bytes) -> Published:
    """Read what may be anybody's bytes. Raises: ManifestError."""
    line, end, manifest = data.partition(b"\n")
    if len(data) > MAX_BYTES or len(line) > _MAX_LINE or not end:
        msg = f"expected a line of at most {_MAX_LINE} bytes and a manifest"
        raise ManifestError(msg)
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    files = document.get("files") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(files, str):
        msg = "expected where the files lie in the first line"
        raise ManifestError(msg)
    check_path(files, "files")
    name, _, nonce = files.partition("/")
    if not name or not NONCE.fullmatch(nonce):
        msg = f"files: expected NAME/shardboot-NONCE, found {files[:120]!r}"
        raise ManifestError(msg)
    return Published(files, manifest)
