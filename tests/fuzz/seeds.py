"""What readers of foreign data accept, for a fuzzer to begin with: made anew, by the product."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from checkpoints import make_checkpoint

from entrypoint.checkpoint.digest import canonical
from entrypoint.checkpoint.entry import INDEX

NAME = "tiny-tp2"


class Room:
    """A directory with one good checkpoint, and a place for files made of what is fed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = make_checkpoint(root / "store", name=NAME)
        self.checkpoint = root / "store" / NAME
        self.index = (self.checkpoint / INDEX).read_bytes()
        for directory in ("rejections", "proofs"):
            (root / "state" / directory).mkdir(parents=True)

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the room, and return where it lies."""
        path = self.root / name
        # Some file systems bring a file to the disk that is written over, and a new one later.
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path


EVIDENCE = canonical(
    {
        "rank": 0,
        "before": {
            "w": {"digest": "d", "dtype": "F32", "shape": [2], "sketch": [1.5, -0.25]},
            "cos": {"digest": "e", "dtype": "F32", "shape": [1], "kind": "recomputed"},
        },
        "after": {"m": {"unprobed": "no such kernel"}},
    }
)
ANSWERS = canonical({"answers": [{"prompt": [1], "tokens": [1, 2], "logprobs": [-0.5]}]})


def ledger_lines(room: Room) -> Iterator[bytes]:
    steps = [
        {"event": "attempt", "boot": "b1", "manifest": "manifest", "host_boot": "host"},
        {"event": "loading", "boot": "b1", "time": 1.5},
        {"event": "attempt", "boot": "b2", "manifest": "manifest", "host_boot": "host"},
        {"event": "loading", "boot": "b2"},
        {"event": "loaded", "boot": "b2"},
        {"event": "unrejected", "manifest": "manifest"},
        {"ranks": [0, 1]},
        {"kind": "unfit", "reason": "shape"},
    ]
    lines = [json.dumps(step).encode() + b"\n" for step in steps]
    yield b"".join(lines)
    yield from lines


def shard_files(room: Room) -> list[bytes]:
    return [path.read_bytes() for path in sorted(room.checkpoint.glob("*.safetensors"))]


def head_of(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
