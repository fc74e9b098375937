"""Files that were copied with their times, as into the layer of an image: known without a read.

A weight file was written when its mtime says, if a clock has set it. Then two of one path, size and
mtime are copies of one, and a few bytes of every tensor bear it out. A time that somebody has set,
as for a reproducible image, many files share, and a few bytes alone prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from blake3 import blake3

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.errors import DamagedError
from entrypoint.model.contents import SECOND, SourceFile
from entrypoint.model.survey import Survey
from entrypoint.state.memory import Memory

SAMPLE_BYTES: Final = 64


def remember(
    survey: Survey, model_files: Mapping[str, str], ways: Mapping[str, str], memory: Memory
) -> None:
    """Keep what a full read gave, for copies with the same times; nothing where those were set.

    Only a clock gives parts of a second: who sets times sets whole ones.
    """
    mtimes: list[Json] = [file.mtime_ns for file in survey.weights]
    if all(file.mtime_ns % SECOND for file in survey.weights):
        entry: dict[str, Json] = {"mtimes": mtimes, "sample": sample(survey)}
        entry["ways"] = cast("Json", dict(ways))
        memory.remember("identities", _question(survey, model_files), entry)


def recall(survey: Survey, model_files: Mapping[str, str], memory: Memory) -> dict[str, str]:
    """Return what a full read gave of files of which these are copies; {} where none is known."""
    known = memory.recall("identities", _question(survey, model_files))
    if not isinstance(known, dict) or "mtimes" not in known:
        return {}
    before = cast("list[int]", known["mtimes"])
    now = [file.mtime_ns for file in survey.weights]
    # An image layer keeps no finer time than seconds.
    if not all(n in (b, b - b % SECOND) for b, n in zip(before, now, strict=True)):
        return {}
    if known.get("sample") != sample(survey):
        return {}
    return cast("dict[str, str]", known["ways"])


def _question(survey: Survey, model_files: Mapping[str, str]) -> str:
    # The directory: a fine-tune beside it may have been written in the same second.
    weights: list[Json] = [[f.path, f.size, f.mtime_ns // SECOND] for f in survey.weights]
    return digest_json(["lookalike", survey.directory, weights, cast("Json", dict(model_files))])


def sample(survey: Survey) -> str:
    """Return a digest of a few bytes of the beginning, middle and end of every tensor.

    Files that are not safetensors are sampled as one tensor.
    """
    root = Path(cast("str", survey.directory))
    hasher = blake3()
    for file in survey.weights:
        hasher.update(f"{file.path}\0{file.size}\0".encode())
        with (root / file.path).open("rb", buffering=0) as opened:
            for begin, end in _spans(root / file.path, file):
                for at in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
                    opened.seek(at)
                    hasher.update(opened.read(min(SAMPLE_BYTES, end - at)) or b"")
    return str(hasher.hexdigest())


def _spans(path: Path, file: SourceFile) -> list[tuple[int, int]]:
    from entrypoint.checkpoint import header  # noqa: PLC0415 - a hit reads no header

    try:
        return [(s.begin, s.end) for s in header.read(path).values()]
    except DamagedError:
        return [(0, file.size)]
