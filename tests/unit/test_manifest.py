from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_key
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint.digest import canonical, digest_json
from entrypoint.checkpoint.entry import INDEX, FileEntry, check_path
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, Source, decode
from entrypoint.errors import ManifestError, SchemaError

Document = dict[str, Any]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
parts = st.from_regex(r"[a-z0-9_][a-z0-9_. -]{0,10}", fullmatch=True)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layout = Layout(tp=draw(st.integers(1, 3)), pp=draw(st.integers(1, 2)))
    sizes = st.integers(0, 2**40)
    weights = [
        FileEntry(
            path=layout.shard_name(rank, part),
            size=draw(sizes),
            blake3=draw(digests),
            role="weights",
            rank=rank,
            part=part,
            tensors=draw(st.integers(0, 9)),
        )
        for rank in layout.ranks
        for part in range(draw(st.integers(1, 2)))
    ]
    paths = draw(st.sets(st.lists(parts, min_size=1, max_size=3).map("/".join), max_size=3))
    model = [
        FileEntry(path=path + ".x", size=draw(sizes), blake3=draw(digests), role="model")
        for path in sorted(paths)
    ]
    index = FileEntry(path=INDEX, size=draw(sizes), blake3=draw(digests), role="index")
    return Manifest(
        name=draw(parts),
        key=make_key(tp=layout.tp, pp=layout.pp, hf_overrides=draw(texts)),
        source=Source(
            name=draw(texts),
            revision=draw(st.none() | texts),
            identity=draw(st.dictionaries(texts, digests, max_size=2)),
        ),
        layout=layout,
        files=(*weights, *model, index),
        decisions=draw(st.dictionaries(texts, st.booleans(), max_size=2)),
        proof=draw(st.none() | st.dictionaries(texts, jsons, max_size=2)),
        save=draw(st.dictionaries(texts, jsons, max_size=3)),
        created_at=draw(texts),
    )


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_checkpoint(tmp_path_factory.mktemp("store"))


def forge(document: Document) -> bytes:
    """Give a document the digest that goes with it, so that it is refused for what it says."""
    document.pop("blake3", None)
    return canonical(document | {"blake3": digest_json(document)})


@given(manifests())
def test_a_manifest_comes_back_from_its_bytes_as_it_was(manifest: Manifest) -> None:
    again = decode(manifest.encode())
    assert again == manifest
    assert again.digest == manifest.digest
    assert again.encode() == manifest.encode()


def test_another_name_is_another_digest_of_the_same_files(manifest: Manifest) -> None:
    renamed = manifest.renamed("other")
    assert renamed.digest != manifest.digest
    assert decode(renamed.encode()).files == manifest.files


def test_a_name_and_a_proof_of_its_own_are_no_other_content(manifest: Manifest) -> None:
    proved = manifest._replace(proof={"items": 1})
    assert proved.digest != manifest.digest
    assert decode(proved.renamed("other").encode()).content == manifest.content
    others = (
        manifest._replace(created_at="2027-01-01T00:00:00Z"),
        manifest._replace(save={"host": "another"}),
        manifest._replace(files=manifest.files[:-1]),
    )
    assert manifest.content not in {other.content for other in others}


def test_a_node_needs_its_ranks_and_every_other_file(manifest: Manifest) -> None:
    paths = {entry.path for entry in manifest.files_for([1])}
    assert {"model-rank-1-part-0.safetensors", INDEX, "config.json"} <= paths
    assert not any("rank-0" in path for path in paths)


def put(where: str, value: object) -> Callable[[Document], None]:
    """Set one field of a document, named as in `files.0.path`."""

    def change(document: Document) -> None:
        *above, last = where.split(".")
        target: Any = document
        for step in above:
            target = target[int(step) if isinstance(target, list) else step]
        target[int(last) if isinstance(target, list) else last] = value

    return change


def drop(where: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        *above, last = where.split(".")
        target: Any = document
        for step in above:
            target = target[int(step) if isinstance(target, list) else step]
        del target[int(last) if isinstance(target, list) else last]

    return change


def repeat_a_file(document: Document) -> None:
    document["files"].append(document["files"][-1])


def everybody_is_a_rank(document: Document) -> None:
    document["layout"] = {"tp": 1 << 16, "pp": 1 << 16, "world": 1 << 32}


def no_index(document: Document) -> None:
    document["files"] = [f for f in document["files"] if f["role"] != "index"]


ESCAPES = ["/etc/passwd", "..", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "", ".hid"]
ESCAPES += ["a/.hid", "a\\b", "a\0b", "a\nb", "\u202etxt", "x" * 256, "/".join("a" * 17)]
OBJECTS = ("key", "source", "layout", "files.0", "files.4")

HOSTILE: list[tuple[str, Callable[[Document], None], str]] = [
    *((f"path {path[:12]!r}", put("files.4.path", path), "path") for path in ESCAPES),
    *((f"name {name[:12]!r}", put("name", name), "name") for name in (*ESCAPES, "a/b")),
    *((f"unknown in {at}", put(f"{at}.zzz", 1), "zzz: unknown") for at in OBJECTS),
    ("unknown at the top", put("zzz", 1), "zzz: unknown"),
    *(
        (f"no {field}", drop(field), rf"{field.rpartition('.')[2]}: missing")
        for field in ("name", "key", "save", "key.tp", "layout.world", "files.0.size")
    ),
    *(
        (f"schema {schema!r}", put("schema", schema), "schema")
        for schema in (2, "1", None, True, 1.0)
    ),
    ("no files", put("files", []), "files"),
    ("files no list", put("files", {}), "files"),
    ("a file no object", put("files.0", "x"), "files"),
    ("a file twice", repeat_a_file, "files"),
    ("a gap in parts", drop("files.0"), "rank 0"),
    ("a rank beyond the world", put("layout.world", 1), "layout.world"),
    ("layout of another key", put("key.tp", 4), "key_digest|layout"),
    ("world true", put("layout.world", True), "layout.world"),
    ("world a float", put("layout.world", 2.0), "layout.world"),
    ("more ranks than files can be", everybody_is_a_rank, "layout.world"),
    ("tp 0", put("layout.tp", 0), "layout"),
    ("tp huge", put("layout.tp", 10**9), "layout.tp"),
    ("rank of another file", put("files.0.rank", 1), "rank"),
    ("rank is text", put("files.0.rank", "0"), "rank"),
    ("rank is false", put("files.0.rank", False), "rank"),
    ("part is a float", put("files.0.part", 0.0), "part"),
    ("weights as model", put("files.0.role", "model"), "files"),
    ("role unknown", put("files.4.role", "code"), "role"),
    ("manifest lists itself", put("files.4.path", "manifest.json"), "path"),
    ("lists have.json", put("files.4.path", "have.json"), "path"),
    ("size negative", put("files.0.size", -1), "size"),
    ("size huge", put("files.0.size", 1 << 60), "size"),
    ("size float", put("files.0.size", 1.5), "size"),
    ("size true", put("files.0.size", True), "size"),
    ("tensors huge", put("files.0.tensors", 1 << 40), "tensors"),
    ("digest short", put("files.0.blake3", "ab"), "blake3"),
    ("digest upper", put("files.0.blake3", "A" * 64), "blake3"),
    ("identity odd", put("source.identity", {"blake3": "x"}), "identity"),
    ("name a number", put("source.name", 7), "source.name"),
    ("name endless", put("source.name", "x" * 5000), "source.name"),
    ("decision a word", put("decisions", {"tied": "yes"}), "decisions.tied"),
    ("save a list", put("save", []), "save"),
    ("proof a word", put("proof", "trust me"), "proof"),
    ("key digest wrong", put("key_digest", "0" * 64), "key_digest"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_what_schema_1_does_not_allow_is_refused_by_name(
    manifest: Manifest, change: Callable[[Document], None], says: str
) -> None:
    document = json.loads(manifest.encode())
    change(document)
    with pytest.raises(ManifestError, match=says):
        decode(forge(document))


def test_a_sound_manifest_of_another_schema_is_told_from_a_damaged_one(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    document |= {"schema": 2, "new": True}
    with pytest.raises(SchemaError) as caught:
        decode(forge(document))
    assert caught.value.found == 2
    # As one flipped bit would leave it.
    with pytest.raises(ManifestError) as damaged:
        decode(canonical(json.loads(manifest.encode()) | {"schema": 3}))
    assert not isinstance(damaged.value, SchemaError)


def test_a_manifest_without_an_index_is_refused(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    no_index(document)
    with pytest.raises(ManifestError, match=INDEX):
        decode(forge(document))


def test_a_digest_that_is_not_of_the_rest_is_refused(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    document["save"] = {"host": "elsewhere"}
    with pytest.raises(ManifestError, match="blake3"):
        decode(canonical(document))
    del document["blake3"]
    with pytest.raises(ManifestError, match="blake3"):
        decode(canonical(document))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe{", b"\x00", b"{}", b"NaN", b"1" * 5000),
        *(b'{"schema": NaN}', b'{"schema": Infinity}', b'{"schema": -Infinity}'),
        *(b'{"schema": 1e400}', b'{"schema": 1.00000000000000000001}', b'{"schema": 1E5}'),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"),
        b'{"schema": 1}' + b"x",
    ],
    ids=lambda data: repr(data[:18]),
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)


def test_a_manifest_without_bounds_is_refused_unread() -> None:
    with pytest.raises(ManifestError, match="at most"):
        decode(b" " * (MAX_MANIFEST_BYTES + 1))


@pytest.mark.parametrize("field", ["source.name", "created_at", "name"])
def test_half_of_a_surrogate_pair_is_refused(manifest: Manifest, field: str) -> None:
    document = json.loads(manifest.encode())
    put(field, "\ud800")(document)
    with pytest.raises(ManifestError):
        decode(json.dumps(document).encode())


def test_nesting_of_any_depth_is_refused_or_read(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    for depth in (10, 100, 500, 5000):
        nested = b"[" * depth + b"]" * depth
        data = canonical(document | {"save": {"x": "@"}}).replace(b'"@"', nested)
        with pytest.raises(ManifestError):
            decode(data)


def test_nesting_that_can_just_be_read_is_refused_like_any_other(manifest: Manifest) -> None:
    document = json.loads(manifest.encode())
    for depth in range(850, 1000):
        nested = b"[" * depth + b"]" * depth
        data = canonical(document | {"save": {"x": "@"}}).replace(b'"@"', nested)
        with pytest.raises(ManifestError):
            decode(data)


def test_no_changed_byte_goes_unnoticed(manifest: Manifest) -> None:
    data = manifest.encode()
    for position in range(0, len(data) - 1, 3):
        for other in (b"0", b"9", b'"', b" ", b"/", b"\xff"):
            mutated = data[:position] + other + data[position + 1 :]
            try:
                assert decode(mutated) == manifest
            except ManifestError:
                continue


@given(st.data())
def test_no_cut_or_splice_gives_anything_but_a_refusal_or_the_same(
    manifest: Manifest, data: st.DataObject
) -> None:
    encoded = manifest.encode()
    begin = data.draw(st.integers(0, len(encoded)))
    end = data.draw(st.integers(begin, min(len(encoded), begin + 40)))
    mutated = encoded[:begin] + data.draw(st.binary(max_size=10)) + encoded[end:]
    with contextlib.suppress(ManifestError):
        assert decode(mutated) == manifest


@given(st.text(max_size=40))
def test_a_path_that_passes_stays_inside_and_in_sight(path: str) -> None:
    try:
        check_path(path, "path")
    except ManifestError:
        return
    inside = Path("/store/checkpoint")
    assert inside in (inside / path).parents
    assert ".." not in Path(path).parts
    assert not any(part.startswith(".") for part in Path(path).parts)


def test_a_manifest_that_lies_of_its_size_is_still_what_it_lists(manifest: Manifest) -> None:
    doubled = manifest._replace(files=manifest.files[:1])
    assert doubled.size == manifest.files[0].size


def test_a_copy_of_all_ranks_is_told_by_the_content_as_ever(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, tp=4)
    assert manifest.part(range(4)) == manifest.content
    parts = {manifest.part(ranks) for ranks in ([0], [1], [0, 1], [2, 3], range(4))}
    assert len(parts) == 5
    assert {len(part) for part in parts} == {64}
    assert manifest.part([1, 0, 1]) == manifest.part([0, 1])


def test_two_saves_that_came_out_the_same_are_one_state(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, tp=4)
    later = manifest.renamed("b")._replace(created_at="2026-02-02T00:00:00Z", proof={"items": 1})
    assert later.content != manifest.content
    assert later.state == manifest.state
    [first, *rest] = manifest.files
    others = (
        manifest._replace(files=(first._replace(blake3="0" * 64), *rest)),
        manifest._replace(files=tuple(rest)),
        manifest._replace(decisions={"tied": True}),
        manifest._replace(key=manifest.key._replace(dtype="float16")),
    )
    assert first.role == "weights"
    assert len({manifest.state, *(other.state for other in others)}) == 1 + len(others)
