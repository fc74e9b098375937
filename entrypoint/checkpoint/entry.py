"""One file of a checkpoint, as its manifest lists it, and what it may be called. Pure.

Entries are foreign data as the manifest is: no path leaves the directory, sizes are bounded, and
the name says the rank and part that it must.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from typing import Literal, NamedTuple, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.fields import (
    a_count,
    a_digest,
    a_text,
    an_object,
    exactly,
    refuse,
)
from entrypoint.checkpoint.layout import Layout

MANIFEST = "manifest.json"
INDEX = "index.json"
HAVE = "have.json"
"""On a node that holds only some ranks: which; written after their files."""

MAX_FILES = 100_000
MAX_FILE_BYTES = 1 << 48

Role = Literal["weights", "model", "index"]


class FileEntry(NamedTuple):
    """One file of a checkpoint; `rank`, `part` and `tensors` (a count) for weights only."""

    path: str
    size: int
    blake3: str
    role: Role
    rank: int | None = None
    part: int | None = None
    tensors: int | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the entry as the manifest holds it."""
        entry: dict[str, Json] = {
            "path": self.path,
            "size": self.size,
            "blake3": self.blake3,
            "role": self.role,
        }
        if self.role == "weights":
            entry |= {"rank": self.rank, "part": self.part, "tensors": self.tensors}
        return entry


def check_path(path: str, field: str) -> None:
    """Refuse a path that could leave its directory or hide in it.

    Raises: ManifestError.
    """
    components = path.split("/")
    odd = any(
        not part or part.startswith(".") or len(part.encode(errors="replace")) > 255  # noqa: PLR2004 - NAME_MAX
        for part in components
    )
    if odd or len(components) > 16 or not path.isprintable() or "\\" in path:  # noqa: PLR2004 - deep enough
        refuse(field, "a relative path with plain names", path)


def read_entries(value: Json, layout: Layout) -> tuple[FileEntry, ...]:
    """Read all entries of a manifest: each rank has every part, and nothing is listed twice.

    Raises: ManifestError.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_FILES:
        refuse("files", f"a list of 1 to {MAX_FILES} files", type(value).__name__)
    entries = tuple(_read_entry(item, f"files[{i}]", layout) for i, item in enumerate(value))
    paths = [entry.path for entry in entries]
    if len(set(paths)) != len(paths):
        refuse("files", "every path once", sorted(p for p in set(paths) if paths.count(p) > 1))
    if INDEX not in paths:
        refuse("files", f"{INDEX} among them", "none")
    parts: dict[int, set[int]] = {rank: set() for rank in layout.ranks}
    for entry in entries:
        if entry.role == "weights":
            parts[cast("int", entry.rank)].add(cast("int", entry.part))
    for rank, found in parts.items():
        if not found or found != set(range(len(found))):
            refuse(f"files of rank {rank}", "parts 0, 1, 2 … without a gap", sorted(found))
    return entries


def _read_entry(value: Json, field: str, layout: Layout) -> FileEntry:
    entry = an_object(value, field)
    role = entry.get("role")
    if role not in ("weights", "model", "index"):
        refuse(f"{field}.role", "weights, model or index", role)
    role = cast("Role", role)
    names = {"path", "size", "blake3", "role"}
    exactly(entry, field, names | ({"rank", "part", "tensors"} if role == "weights" else set()))
    path = a_text(entry["path"], f"{field}.path")
    check_path(path, f"{field}.path")
    if path in (MANIFEST, HAVE) or (path == INDEX) != (role == "index"):
        refuse(f"{field}.path", f"a name that fits role {role}", path)
    ranked = layout.rank_of(path)
    if (role == "weights") != (ranked is not None):
        refuse(f"{field}.path", f"a name that fits role {role} in this layout", path)
    if ranked is not None:
        said = tuple(a_count(entry[n], f"{field}.{n}", MAX_FILES) for n in ("rank", "part"))
        if said != ranked:
            refuse(f"{field}.rank", f"rank and part as in {path}", said)
    if ranked is not None and ranked[0] not in layout.ranks:
        refuse(f"{field}.rank", f"a rank below {layout.world}", ranked[0])
    return FileEntry(
        path=path,
        size=a_count(entry["size"], f"{field}.size", MAX_FILE_BYTES),
        blake3=a_digest(entry["blake3"], f"{field}.blake3"),
        role=role,
        rank=ranked[0] if ranked else None,
        part=ranked[1] if ranked else None,
        tensors=a_count(entry["tensors"], f"{field}.tensors", 1 << 24) if ranked else None,
    )
