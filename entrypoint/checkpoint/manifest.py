"""The manifest, schema 1: what a checkpoint is and every file in it. Pure.

Written last: no manifest, no checkpoint. Manifests are foreign data: everything read is checked,
unknown fields are refused by name, no path leaves the directory, sizes are bounded.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Literal, NamedTuple, NoReturn, Self, cast

from entrypoint.checkpoint.digest import Json, canonical, digest_json
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import Layout
from entrypoint.errors import ManifestError, SchemaError

SCHEMA = 1
MANIFEST = "manifest.json"
INDEX = "index.json"
HAVE = "have.json"
"""On a node that holds only some ranks: which; written after their files."""

MAX_MANIFEST_BYTES = 64 * 1024 * 1024
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


class Source(NamedTuple):
    """The model that a checkpoint was saved from.

    `identity` maps the name of a way to identify ("blake3", "sha256") to the digest it gave.
    """

    name: str
    revision: str | None
    identity: Mapping[str, str]

    def to_json(self) -> dict[str, Json]:
        """Return the source as the manifest holds it."""
        return {"name": self.name, "revision": self.revision, "identity": dict(self.identity)}


class _Fields(NamedTuple):
    name: str
    key: Key
    source: Source
    layout: Layout
    files: tuple[FileEntry, ...]
    decisions: Mapping[str, bool]
    proof: Mapping[str, Json] | None
    save: Mapping[str, Json]
    created_at: str


class Manifest(_Fields):
    """What a checkpoint is. `decisions` is what vLLM decided at the save and must not at the load.

    `proof` is evidence that it loads to the source's state, or None; `save` tells about the save
    and decides nothing. `created_at` is UTC, ISO 8601.
    """

    def to_json(self) -> dict[str, Json]:
        """Return every field but the manifest's own digest."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "key": self.key.to_json(),
            "key_digest": self.key.digest,
            "source": self.source.to_json(),
            "layout": {"world": self.layout.world, "tp": self.layout.tp, "pp": self.layout.pp},
            "files": [entry.to_json() for entry in self.files],
            "decisions": dict(self.decisions),
            "proof": None if self.proof is None else dict(self.proof),
            "save": dict(self.save),
            "created_at": self.created_at,
        }

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of all the rest, which the manifest itself holds."""
        return digest_json(self.to_json())

    @cached_property
    def content(self) -> str:
        """BLAKE3 of all but the name: what proofs and rejections go by, in every store.

        A copy may have to take the next generation's name, and is still the same checkpoint.
        """
        document = self.to_json()
        del document["name"]
        return digest_json(document)

    @property
    def state(self) -> str:
        """BLAKE3 of what is loaded: equal for two saves that came out the same."""
        weights: dict[str, Json] = {e.path: e.blake3 for e in self.files if e.role == "weights"}
        return digest_json([self.key.digest, dict(self.decisions), weights])

    def encode(self) -> bytes:
        """Return the bytes of `manifest.json`: canonical JSON, one line."""
        return canonical(self.to_json() | {"blake3": self.digest}) + b"\n"

    def renamed(self, name: str) -> Self:
        """Return the same checkpoint under another published name."""
        return self._replace(name=name)

    @property
    def size(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size for entry in self.files)

    def files_for(self, ranks: Iterable[int]) -> tuple[FileEntry, ...]:
        """Return what a node with `ranks` needs: their shard files, and every model file."""
        wanted = set(ranks)
        return tuple(e for e in self.files if e.role != "weights" or e.rank in wanted)

    def size_for(self, ranks: Iterable[int]) -> int:
        """Bytes of these files."""
        return sum(entry.size for entry in self.files_for(ranks))

    def part(self, ranks: Iterable[int]) -> str:
        """Return what tells a copy for `ranks` from one for others: hex digits."""
        wanted = sorted(set(ranks))
        if wanted == [*self.layout.ranks]:
            return self.content
        return digest_json([self.content, [*wanted]])


def decode(data: bytes) -> Manifest:
    """Read a manifest from foreign bytes.

    Raises: ManifestError naming the field, what was expected and what was found; SchemaError.
    """
    document = _object(_parse(data), "manifest")
    claimed = document.pop("blake3", None)
    found = _digest_of(document)
    schema = document.get("schema")
    if type(schema) is int and schema != SCHEMA and claimed == found:
        raise SchemaError(f"schema: expected {SCHEMA}, found {schema}", found=schema)
    if type(schema) is not int or schema != SCHEMA:
        _refuse("schema", f"{SCHEMA}", schema)
    _exactly(
        document,
        "manifest",
        {"schema", "name", "key", "key_digest", "source", "layout", "files"}
        | {"decisions", "proof", "save", "created_at"},
    )
    key = Key.from_json(document["key"])
    layout = _layout(document["layout"])
    manifest = Manifest(
        name=_name(document["name"]),
        key=key,
        source=_source(document["source"]),
        layout=layout,
        files=_files(document["files"], layout),
        decisions=_decisions(document["decisions"]),
        proof=None if document["proof"] is None else _object(document["proof"], "proof"),
        save=_object(document["save"], "save"),
        created_at=_text(document["created_at"], "created_at"),
    )
    if document["key_digest"] != key.digest:
        _refuse("key_digest", key.digest, document["key_digest"])
    if claimed != found:
        _refuse("blake3", "the digest of the rest of the manifest", claimed)
    if (layout.tp, layout.pp) != (key.tp, key.pp):
        _refuse("layout", f"tp {key.tp}, pp {key.pp} as in the key", document["layout"])
    return manifest


def _parse(data: bytes) -> Json:
    if len(data) > MAX_MANIFEST_BYTES:
        msg = f"manifest: {len(data)} bytes, expected at most {MAX_MANIFEST_BYTES}"
        raise ManifestError(msg)
    try:
        return cast("Json", json.loads(data, parse_constant=_no_constant, parse_float=_no_float))
    except (ValueError, RecursionError) as error:
        msg = f"manifest: not JSON as schema {SCHEMA} allows: {str(error)[:200]}"
        raise ManifestError(msg) from None


def digest_in(data: bytes) -> str:
    """Return the digest that a manifest's bytes give, whatever else they say: a cheap comparison.

    Raises: ManifestError when they are no JSON object.
    """
    document = _object(_parse(data), "manifest")
    document.pop("blake3", None)
    return _digest_of(document)


def _digest_of(document: dict[str, Json]) -> str:
    try:
        return digest_json(document)
    except RecursionError:
        msg = "manifest: nested too deeply"
        raise ManifestError(msg) from None


def _no_constant(word: str) -> NoReturn:
    msg = f"{word} is not allowed"
    raise ValueError(msg)


def _no_float(word: str) -> float:
    # Digits only a float can hold would not survive being written again in canonical form.
    value = float(word)
    if abs(value) > 2**53 or repr(value) != word:
        msg = f"number {word[:40]} is not allowed"
        raise ValueError(msg)
    return value


def _refuse(field: str, expected: str, found: object) -> NoReturn:
    msg = f"{field}: expected {expected}, found {str(found)[:120]!r}"
    raise ManifestError(msg)


def _object(value: Json, field: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        _refuse(field, "an object", value)
    return value


def _exactly(value: Mapping[str, Json], field: str, names: set[str]) -> None:
    for name in sorted(value.keys() ^ names):
        what = "unknown" if name in value else "missing"
        msg = f"{field}.{name[:80]}: {what} field"
        raise ManifestError(msg)


def _text(value: Json, field: str, limit: int = 4096) -> str:
    if not isinstance(value, str) or len(value) > limit or not _is_text(value):
        _refuse(field, f"a text of at most {limit} characters", value)
    return value


def _is_text(value: str) -> bool:
    """Tell real text from what holds half of a surrogate pair, and could not be written."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _count(value: Json, field: str, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        _refuse(field, f"a whole number from 0 to {limit}", value)
    return value


def _digest(value: Json, field: str) -> str:
    text = _text(value, field, 64)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):  # noqa: PLR2004 - 256 bits
        _refuse(field, "64 hex digits", value)
    return text


def _name(value: Json) -> str:
    name = _text(value, "name", 255)
    check_path(name, "name")
    if "/" in name:
        _refuse("name", "a plain name", value)
    return name


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
        _refuse(field, "a relative path with plain names", path)


def _layout(value: Json) -> Layout:
    layout = _object(value, "layout")
    _exactly(layout, "layout", {"world", "tp", "pp"})
    tp, pp = (_count(layout[n], f"layout.{n}", 1 << 16) for n in ("tp", "pp"))
    # Every rank has a file of its own, so that files bound ranks.
    world = _count(layout["world"], "layout.world", MAX_FILES)
    if tp < 1 or pp < 1 or world != tp * pp:
        _refuse("layout.world", f"tp x pp = {tp * pp}", world)
    return Layout(tp=tp, pp=pp)


def _source(value: Json) -> Source:
    source = _object(value, "source")
    _exactly(source, "source", {"name", "revision", "identity"})
    identity = _object(source["identity"], "source.identity")
    revision = source["revision"]
    return Source(
        name=_text(source["name"], "source.name"),
        revision=None if revision is None else _text(revision, "source.revision"),
        identity={k: _digest(v, f"source.identity.{k[:40]}") for k, v in identity.items()},
    )


def _decisions(value: Json) -> dict[str, bool]:
    decisions = _object(value, "decisions")
    for name, decided in decisions.items():
        if not isinstance(decided, bool):
            _refuse(f"decisions.{name[:80]}", "true or false", decided)
    return cast("dict[str, bool]", decisions)


def _files(value: Json, layout: Layout) -> tuple[FileEntry, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_FILES:
        _refuse("files", f"a list of 1 to {MAX_FILES} files", type(value).__name__)
    entries = tuple(_file(item, f"files[{i}]", layout) for i, item in enumerate(value))
    paths = [entry.path for entry in entries]
    if len(set(paths)) != len(paths):
        _refuse("files", "every path once", sorted(p for p in set(paths) if paths.count(p) > 1))
    if INDEX not in paths:
        _refuse("files", f"{INDEX} among them", "none")
    parts: dict[int, set[int]] = {rank: set() for rank in layout.ranks}
    for entry in entries:
        if entry.role == "weights":
            parts[cast("int", entry.rank)].add(cast("int", entry.part))
    for rank, found in parts.items():
        if not found or found != set(range(len(found))):
            _refuse(f"files of rank {rank}", "parts 0, 1, 2 … without a gap", sorted(found))
    return entries


def _file(value: Json, field: str, layout: Layout) -> FileEntry:
    entry = _object(value, field)
    role = entry.get("role")
    if role not in ("weights", "model", "index"):
        _refuse(f"{field}.role", "weights, model or index", role)
    role = cast("Role", role)
    names = {"path", "size", "blake3", "role"}
    _exactly(entry, field, names | ({"rank", "part", "tensors"} if role == "weights" else set()))
    path = _text(entry["path"], f"{field}.path")
    check_path(path, f"{field}.path")
    if path in (MANIFEST, HAVE) or (path == INDEX) != (role == "index"):
        _refuse(f"{field}.path", f"a name that fits role {role}", path)
    ranked = layout.rank_of(path)
    if (role == "weights") != (ranked is not None):
        _refuse(f"{field}.path", f"a name that fits role {role} in this layout", path)
    if ranked is not None:
        said = tuple(_count(entry[n], f"{field}.{n}", MAX_FILES) for n in ("rank", "part"))
        if said != ranked:
            _refuse(f"{field}.rank", f"rank and part as in {path}", said)
    if ranked is not None and ranked[0] not in layout.ranks:
        _refuse(f"{field}.rank", f"a rank below {layout.world}", ranked[0])
    return FileEntry(
        path=path,
        size=_count(entry["size"], f"{field}.size", MAX_FILE_BYTES),
        blake3=_digest(entry["blake3"], f"{field}.blake3"),
        role=role,
        rank=ranked[0] if ranked else None,
        part=ranked[1] if ranked else None,
        tensors=_count(entry["tensors"], f"{field}.tensors", 1 << 24) if ranked else None,
    )
