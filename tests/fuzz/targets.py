"""What reads foreign data, one function a reader, for a fuzzer to feed.

Each takes any bytes and says whether they were accepted. What is refused must be so by one of our
own errors, in one printable line of bounded length; of what is accepted, the promise is asserted
that the rest of the product relies on. Anything else that is raised is a bug.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import TENSORS, make_key, shards
from fuzz.seeds import ANSWERS, EVIDENCE, NAME, Room, head_of, ledger_lines, shard_files

from entrypoint.checkpoint import fragment, header, index, inspect, manifest, proof
from entrypoint.checkpoint.digest import canonical, digest_bytes, digest_json
from entrypoint.checkpoint.entry import INDEX, check_path
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.inspect import ranks_held
from entrypoint.checkpoint.key import Key, differences
from entrypoint.checkpoint.layout import (
    Layout,
    checkpoint_name,
    generation_of,
    layout_of,
    with_generation,
)
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.errors import DamagedError, ManifestError, ProofError, SaveError, ShardbootError
from entrypoint.health.standing import stand
from entrypoint.state import status
from entrypoint.state.attempts import failures_in_row
from entrypoint.state.files import read_json
from entrypoint.state.ledger import Ledger
from entrypoint.state.process import is_alive
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections

LONGEST_MESSAGE = 3000
NAME_MAX = 255


class Target(NamedTuple):
    """A reader, and bytes that it accepts."""

    read: Callable[[Room, bytes], bool]
    seeds: Callable[[Room], Iterable[bytes]]


class Refusal:
    """Whether something was refused."""

    came = False


@contextlib.contextmanager
def refusal(kind: type[ShardbootError]) -> Iterator[Refusal]:
    """Let a reader refuse by `kind` alone, in words that fit a log."""
    found = Refusal()
    try:
        yield found
    except kind as error:
        found.came = True
        check_words(str(error))


def check_words(text: str) -> None:
    assert text.isprintable(), f"not one printable line: {text[:300]!r}"
    assert len(text) <= LONGEST_MESSAGE, f"{len(text)} characters of message: {text[:300]!r}"


def check_inside(path: str) -> None:
    inside = Path("/store/checkpoint")
    assert inside in (inside / path).parents
    assert not any(part.startswith(".") for part in Path(path).parts)


def sealed(data: bytes, index_bytes: bytes = b"") -> bytes:
    """Give a manifest the digests that go with it, so that it is judged by what it says."""
    try:
        document = json.loads(data)
        document.pop("blake3", None)
        document["key_digest"] = digest_json(document["key"])
        for entry in document["files"]:
            if index_bytes and entry["path"] == INDEX:
                entry |= {"size": len(index_bytes), "blake3": digest_bytes(index_bytes)}
        return canonical(document | {"blake3": digest_json(document)})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return data


def read_manifest(room: Room, data: bytes) -> bool:
    with refusal(ManifestError):
        manifest.decode(data)
    with refusal(ManifestError) as refused:
        found = manifest.decode(sealed(data))
        again = manifest.decode(found.encode())
        assert again == found
        assert again.digest == json.loads(sealed(data))["blake3"]
        assert manifest.digest_in(sealed(data)) == found.digest
        for entry in found.files:
            check_inside(entry.path)
    return not refused.came


def read_checkpoint(room: Room, data: bytes) -> bool:
    """Look at a checkpoint whose manifest and index, a line each, are foreign."""
    first, _, index_bytes = data.partition(b"\n")
    room.write(f"store/{NAME}/{INDEX}", index_bytes)
    room.write(f"store/{NAME}/{MANIFEST}", sealed(first, index_bytes))
    with refusal(ManifestError):
        found = inspect.read_manifest(room.checkpoint)
        with contextlib.suppress(OSError):  # a path may be longer than the system takes
            looked = inspect.examine(room.checkpoint, found, found.layout.ranks, {})
            for discrepancy in looked.discrepancies:
                check_words(discrepancy)
            return not looked.discrepancies
    return False


def read_index(room: Room, data: bytes) -> bool:
    with refusal(ManifestError) as refused:
        found = index.decode(data)
        assert set(index.decode(index.encode(found))) == set(found)
        assert {tensor.file for tensor in found} == set(index.by_file(found))
    return not refused.came


def read_header(room: Room, data: bytes) -> bool:
    """Read the JSON of a header, as of a file that is as long as it says."""
    size = 8 + len(data) + declared(data)
    with refusal(DamagedError) as refused:
        check_slices(header.parse(data, size, "file"), 8 + len(data), size)
    return not refused.came


def declared(data: bytes) -> int:
    try:
        entries: dict[str, Any] = json.loads(data)
        ends = [e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"]
        return max(0, *(end for end in ends if type(end) is int), 0)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return 0


def read_shard_file(room: Room, data: bytes) -> bool:
    path = room.write("shard", data)
    with refusal(DamagedError) as refused:
        length = int.from_bytes(data[:8], "little")
        check_slices(header.read(path), 8 + length, len(data))
    return not refused.came


def check_slices(slices: dict[str, header.Slice], begin: int, end: int) -> None:
    """Assert that tensors follow each other without a gap to the end of the file."""
    for each in sorted(slices.values(), key=lambda each: (each.begin, each.end)):
        assert each.begin == begin
        begin = each.end
    assert begin == end


def read_fragment(room: Room, data: bytes) -> bool:
    with refusal(SaveError) as refused:
        fragment.decode(data)
    return not refused.came


def read_proof(room: Room, data: bytes) -> bool:
    """Read evidence: a line for each rank, and one of answers."""
    *ranks, answers = data.split(b"\n")
    with refusal(ProofError) as refused:
        found = proof.read(ranks, answers)
        assert proof.compare(found, found).proves
        known = proof.read([EVIDENCE], ANSWERS)
        for source, other in ((known, found), (found, known)):
            proof.compare(source, other)
            proof.compare(source, other, other)
        canonical(proof.summary(found, controlled=False, vllm="0", plugin="0"))
    return not refused.came


def read_key(room: Room, data: bytes) -> bool:
    try:
        document = json.loads(data)
    except (RecursionError, ValueError):
        return False
    with refusal(ManifestError) as refused:
        key = Key.from_json(document)
        assert differences(key, key) == ()
        assert Key.from_json(json.loads(canonical(key.to_json()))).digest == key.digest
        assert "/" not in checkpoint_name("org/model", key)
        assert layout_of(key).world >= 0
    return not refused.came


def read_state(room: Room, data: bytes) -> bool:
    """Read the state directory, whose files may be torn, or edited: it never complains."""
    state = room.root / "state"
    proof = f"proofs/{room.manifest.content}.json"
    for name in ("ledger.jsonl", "rejections/d.json", proof):
        room.write(f"state/{name}", data)
    entries = list(Ledger(state).entries())
    for some in (entries, Ledger(state).recent_about("manifest")):
        assert failures_in_row(some, "manifest", "host", lambda *one: is_alive(*one[:2])) >= 0
    read_json(state / proof)
    Rejections(state).find("d")
    Proofs(state).find(room.manifest)
    held = room.write("have.json", data)
    ranks_held(held.parent)
    return bool(entries)


def read_file(room: Room, data: bytes) -> bool:
    """Read whatever lies under a name: its kind, the limit and its content are foreign."""
    kind, limit, content = data[:1], int.from_bytes(data[1:3], "little"), data[3:]
    path = room.root / "node"
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    match kind:
        case b"l":
            path.symlink_to(room.write("target", content))
        case b"f":
            os.mkfifo(path)
        case b"d":
            path.mkdir()
        case b"n":
            path = room.root / os.fsdecode(content)
        case b"r":
            path.write_bytes(content)
        case _:
            return False
    try:
        found = read_bounded(path, limit)
    except (OSError, ValueError):
        assert kind != b"r" or len(content) > limit
        return False
    assert kind in (b"r", b"n")
    assert len(found) <= limit
    return True


def read_status(room: Room, data: bytes) -> bool:
    """Read a boot's status file; watch that boot by the ledger's lines, which are foreign too."""
    first, _, lines = data.partition(b"\n")
    (room.root / "status").mkdir(exist_ok=True)
    room.write("status/b1.json", first)
    room.write("ledger.jsonl", lines)
    found = status.read_all(room.root)
    for boot in found:
        assert status.Status.from_json(boot.to_json()) == boot
        for life in (boot.server.life, "here", "elsewhere"):
            check_words(stand(boot, Ledger(room.root).recent_about("b1"), life, time.time()).line)
        time.localtime(boot.started)
    return bool(found)


def read_names(room: Room, data: bytes) -> bool:
    name = data[:NAME_MAX].decode(errors="surrogateescape")
    for layout in (Layout(tp=2, pp=1), Layout(tp=2, pp=2)):
        ranked = layout.rank_of(name)
        assert ranked is None or layout.shard_name(*ranked) == name
    base, generation = generation_of(name)
    assert with_generation(base, generation) == name
    with refusal(ManifestError) as refused:
        check_path(name, "path")
        check_inside(name)
    return not refused.came


TARGETS: dict[str, Target] = {
    "manifest": Target(read_manifest, lambda room: [room.manifest.encode()]),
    "checkpoint": Target(read_checkpoint, lambda room: [room.manifest.encode() + room.index]),
    "index": Target(read_index, lambda room: [room.index]),
    "header": Target(read_header, lambda room: [head_of(data) for data in shard_files(room)]),
    "shard file": Target(read_shard_file, shard_files),
    "fragment": Target(
        read_fragment,
        lambda room: [shards(make_key(), r, 2, TENSORS, 0)[0].encode() for r in (0, 1)],
    ),
    "proof": Target(read_proof, lambda room: [EVIDENCE + b"\n" + ANSWERS]),
    "key": Target(read_key, lambda room: [canonical(make_key().to_json())]),
    "state": Target(read_state, ledger_lines),
    "status": Target(
        read_status,
        lambda room: [
            canonical(status.Status("b1", "starting", done=7, total=9).to_json())
            + b'\n{"boot":"b1","event":"loading","time":1.5}\n{"boot":"b1","event":"loaded"}\n',
        ],
    ),
    "file": Target(
        read_file,
        lambda room: [kind + b"\xff\xffcontent" for kind in (b"r", b"l", b"f", b"d", b"n")],
    ),
    "names": Target(
        read_names,
        lambda room: [*(e.path.encode() for e in room.manifest.files), b"a-tp2-bf16-g2"],
    ),
}
