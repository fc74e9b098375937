"""Fuzz one reader of foreign data, guided by coverage, for some seconds.

    python tests/fuzz/drive.py TARGET ROOM [--seconds 60]    fuzz; ROOM is a directory to make
    python tests/fuzz/drive.py TARGET ROOM --input FILE      feed one file, as one that was found

libFuzzer's own exit status: 0 nothing found, 70 too slow, 71 too much memory, 77 an exception;
what was fed then lies in ROOM.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
with atheris.instrument_imports(include=["entrypoint", "fuzz"]):
    from fuzz.seeds import Room
    from fuzz.targets import TARGETS
from fuzz.mutate import mutate

LONGEST_INPUT = 16_384
SLOWEST_SECONDS = 25
MOST_MEMORY_MB = 768
TOKENS = (
    "NaN",
    "Infinity",
    "1e999",
    "true",
    "null",
    "9007199254740993",
    "\\ud800",
    "../",
    "[" * 64,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("room", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input", type=Path)
    given = parser.parse_args()
    given.room.mkdir(parents=True)
    room, target = Room(given.room), TARGETS[given.target]
    if given.input:
        print("accepted" if target.read(room, given.input.read_bytes()) else "refused")
        return
    seeds = [bytes(seed) for seed in target.seeds(room)]
    corpus = given.room / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = given.room / "words.dict"
    words.write_text("".join(f'"{escaped(word)}"\n' for word in [*TOKENS, *sorted(names(seeds))]))
    flags = [
        f"-max_total_time={given.seconds}",
        f"-max_len={LONGEST_INPUT}",
        # A shorter input that takes the same branches is seldom as good as a seed that is accepted.
        "-reduce_inputs=0",
        "-len_control=0",
        f"-timeout={SLOWEST_SECONDS}",
        f"-rss_limit_mb={MOST_MEMORY_MB}",
        f"-dict={words}",
        f"-artifact_prefix={given.room}/",
        "-print_final_stats=1",
    ]

    def feed(data: bytes) -> None:
        target.read(room, data)

    atheris.Setup([sys.argv[0], *flags, str(corpus)], feed, custom_mutator=change)
    atheris.Fuzz()


def change(data: bytes, limit: int, seed: int) -> bytes:
    """Change JSON as JSON half of the time, and bytes otherwise."""
    chance = random.Random(seed)  # noqa: S311 - libFuzzer's own seed
    changed = mutate(data, chance) if chance.random() < 0.5 else b""
    if not 0 < len(changed) <= limit:
        changed = atheris.Mutate(data, limit)
    return changed


def names(seeds: list[bytes]) -> set[str]:
    """Return the names of all fields in all lines of JSON."""
    found: set[str] = set()
    for line in b"\n".join(seeds).splitlines():
        try:
            json.loads(line, object_pairs_hook=lambda pairs: found.update(n for n, _ in pairs))
        except ValueError:
            continue
    return {name for name in found if name}


def escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


if __name__ == "__main__":
    main()
