"""A room for benches with real vLLM: a model, its checkpoint, and servers on either."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from crashing import FOR_EVER, Crashes, Held
from killing import PARTS, part, wait_for_another
from models import make_model
from page_cache import cached, evict
from processes import Program, ProgramError, descendants, end, run
from serving import FLAGS, OWN_SHM, Server, decision, environment

from entrypoint.state.ledger import Ledger

__all__ = [
    "FOR_EVER",
    "OWN_SHM",
    "PARTS",
    "Crashes",
    "Held",
    "Program",
    "ProgramError",
    "Room",
    "Server",
    "cached",
    "decision",
    "descendants",
    "drop_page_cache",
    "end",
    "evict",
    "parser",
    "part",
    "prepare",
    "wait_for_another",
]

BIN: Final = Path(sys.executable).parent
WEIGHTS: Final = re.compile(r"Loading weights took ([\d.]+) seconds")


class Room:
    """A directory with a model in it, and with stores and a state directory of its own."""

    def __init__(self, directory: Path, tp: int, hidden: int, layers: int) -> None:
        self.directory, self.tp = directory, tp
        self.model = directory / "model"
        make_model("dense", self.model, hidden=hidden, layers=layers)
        self.local, self.shared = directory / "checkpoints", directory / "shared"
        self.shared.mkdir()
        self.state = directory / "state"
        self.words = [str(self.model), *FLAGS, "-tp", str(tp)]
        self.environ = environment(tp) | {
            "SHARDBOOT_LOCAL_DIR": str(self.local),
            "SHARDBOOT_STATE_DIR": str(self.state),
            "SHARDBOOT_LOG_FORMAT": "json",
        }

    @classmethod
    @contextmanager
    def of(cls, given: argparse.Namespace) -> Iterator[Self]:
        """Make a room as the command line says (`parser`), and remove it at the end."""
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="bench.") as directory:
            yield cls(Path(directory), given.tp, given.hidden, given.layers)

    @property
    def gigabytes(self) -> float:
        """The size of the model's weights, in GB."""
        return sum(path.stat().st_size for path in self.model.glob("*.safetensors")) / 1e9

    def shardboot(self, *words: str, environ: Mapping[str, str] | None = None) -> float:
        """Run shardboot and return the seconds it took. Raises: ProgramError."""
        started = time.monotonic()
        log = self.directory / f"{words[0]}.log"
        command = [str(BIN / "shardboot"), *words]
        status, _ = run(command, self.environ | dict(environ or {}), log)
        if status:
            raise ProgramError(f"{words[0]} ended with {status}:\n{log.read_text()}")
        return time.monotonic() - started

    def serve(
        self, program: str, words: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> Server:
        """Start a server, with a /dev/shm of its own: nobody cleans up after a kill."""
        command = [*OWN_SHM, str(BIN / program), "serve", *words]
        return Server(command, self.environ | dict(environ or {}), self.directory / "server.log")

    def loaded(self, server: Server) -> float | None:
        """Return the seconds its weights took, as vLLM's loader or else as ours has noted it."""
        told = WEIGHTS.findall(server.log.read_text(errors="replace"))
        if told:
            return float(told[-1])
        entries = Ledger(self.state).entries()
        seconds = [float(str(e["seconds"])) for e in entries if e["event"] == "loaded"]
        return seconds[-1] if seconds else None


def parser(usage: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the words that all benches of real vLLM know."""
    words = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("directory", nargs="?", type=Path, default=tempfile.gettempdir())
    words.add_argument("--out", type=Path, help="leave the figures in this folder, as JSON")
    words.add_argument("--rounds", type=int, default=rounds)
    words.add_argument("--hidden", type=int, default=3072)
    words.add_argument("--layers", type=int, default=18)
    words.add_argument("--tp", type=int, default=2)
    return words


def prepare(path: Path, *, cold: bool) -> None:
    """Have all of a file in the page cache, or nothing. Raises: ProgramError."""
    if cold:
        evict(path)
    else:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    if cached(path) != (not cold):
        raise ProgramError(f"{path}: {cached(path):.0%} of it in the page cache")


def drop_page_cache() -> None:
    """Make every file cold, as root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
