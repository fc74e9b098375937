"""The manifest, schema 1: what a checkpoint is and every file in it. Pure.

Written last: no manifest, no checkpoint. Manifests are foreign data: everything read is checked,
unknown fields are refused by name, no path leaves the directory, sizes are bounded.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Self, cast

from entrypoint.checkpoint.digest import Json, canonical, digest_json
from entrypoint.checkpoint.entry import MANIFEST as MANIFEST  # noqa: PLC0414 - looked for here
from entrypoint.checkpoint.entry import MAX_FILES, FileEntry, check_path, read_entries
from entrypoint.checkpoint.fields import (
    a_count,
    a_digest,
    a_text,
    an_object,
    exactly,
    parse,
    refuse,
)
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import Layout
from entrypoint.errors import ManifestError, SchemaError

SCHEMA = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024


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
        """BLAKE3 of all but name and proof: what proofs and rejections go by, in every store.

        A copy may have to take the next generation's name, or bring a proof that was made later,
        and is still the same checkpoint.
        """
        document = self.to_json()
        del document["name"], document["proof"]
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
    document = an_object(_parse(data), "manifest")
    claimed = document.pop("blake3", None)
    found = _digest_of(document)
    schema = document.get("schema")
    if type(schema) is int and schema != SCHEMA and claimed == found:
        raise SchemaError(f"schema: expected {SCHEMA}, found {schema}", found=schema)
    if type(schema) is not int or schema != SCHEMA:
        refuse("schema", f"{SCHEMA}", schema)
    exactly(
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
        files=read_entries(document["files"], layout),
        decisions=_decisions(document["decisions"]),
        proof=None if document["proof"] is None else an_object(document["proof"], "proof"),
        save=an_object(document["save"], "save"),
        created_at=a_text(document["created_at"], "created_at"),
    )
    if document["key_digest"] != key.digest:
        refuse("key_digest", key.digest, document["key_digest"])
    if claimed != found:
        refuse("blake3", "the digest of the rest of the manifest", claimed)
    if (layout.tp, layout.pp) != (key.tp, key.pp):
        refuse("layout", f"tp {key.tp}, pp {key.pp} as in the key", document["layout"])
    return manifest


def _parse(data: bytes) -> Json:
    if len(data) > MAX_MANIFEST_BYTES:
        msg = f"manifest: {len(data)} bytes, expected at most {MAX_MANIFEST_BYTES}"
        raise ManifestError(msg)
    return parse(data)


def digest_in(data: bytes) -> str:
    """Return the digest that a manifest's bytes give, whatever else they say: a cheap comparison.

    Raises: ManifestError when they are no JSON object.
    """
    document = an_object(_parse(data), "manifest")
    document.pop("blake3", None)
    return _digest_of(document)


def _digest_of(document: dict[str, Json]) -> str:
    try:
        return digest_json(document)
    except RecursionError:
        msg = "manifest: nested too deeply"
        raise ManifestError(msg) from None


def _name(value: Json) -> str:
    name = a_text(value, "name", 255)
    check_path(name, "name")
    if "/" in name:
        refuse("name", "a plain name", value)
    return name


def _layout(value: Json) -> Layout:
    layout = an_object(value, "layout")
    exactly(layout, "layout", {"world", "tp", "pp"})
    tp, pp = (a_count(layout[n], f"layout.{n}", 1 << 16) for n in ("tp", "pp"))
    # Every rank has a file of its own, so that files bound ranks.
    world = a_count(layout["world"], "layout.world", MAX_FILES)
    if tp < 1 or pp < 1 or world != tp * pp:
        refuse("layout.world", f"tp x pp = {tp * pp}", world)
    return Layout(tp=tp, pp=pp)


def _source(value: Json) -> Source:
    source = an_object(value, "source")
    exactly(source, "source", {"name", "revision", "identity"})
    identity = an_object(source["identity"], "source.identity")
    revision = source["revision"]
    return Source(
        name=a_text(source["name"], "source.name"),
        revision=None if revision is None else a_text(revision, "source.revision"),
        identity={k: a_digest(v, f"source.identity.{k[:40]}") for k, v in identity.items()},
    )


def _decisions(value: Json) -> dict[str, bool]:
    decisions = an_object(value, "decisions")
    for name, decided in decisions.items():
        if not isinstance(decided, bool):
            refuse(f"decisions.{name[:80]}", "true or false", decided)
    return cast("dict[str, bool]", decisions)
