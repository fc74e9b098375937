"""Which model the source is, wherever its files lie.

Two ways to say it: "sha256", from the names of the hub's blobs, without reading a weight; and
"blake3", over every weight file's whole content. Both take in the bytes of all model files, since
another tokenizer or template under the same weights is another model.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from blake3 import blake3

from entrypoint.checkpoint.digest import PIECE_BYTES, Json, digest_file, digest_json
from entrypoint.checkpoint.key import Key
from entrypoint.errors import DamagedError, StoreError
from entrypoint.model.hub import hub_cache
from entrypoint.model.survey import SourceFile, Survey, require_readable
from entrypoint.state.memory import Memory

SAMPLE_BYTES: Final = 64
TRUE_MTIME_NS: Final = 86_400 * 366 * 10**9
"""Below it, an mtime says only that somebody set all of them to an epoch."""


class Identity(NamedTuple):
    """The source as known so far: digests of its model files, and of the whole by each way.

    `ways` holds "sha256" and "blake3" as far as they are known without reading weights.
    """

    model_files: Mapping[str, str]
    ways: Mapping[str, str]

    @property
    def config_digest(self) -> str:
        """Digest of all model files: what vLLM's resolution reads of the source."""
        return digest_json(cast("Json", dict(self.model_files)))


def key_by_config(key: Key, identity: Identity) -> str:
    """Return the key's digest with all of the model but its weights for the model.

    What vLLM makes of a model, a refusal to save it above all, hangs on that.
    """
    return key._replace(model=identity.config_digest).digest


def recall(survey: Survey, memory: Memory) -> Identity:
    """Return what is known of the source without reading a weight byte; keeps what it learns.

    Remembered under every file's (path, size, mtime, inode, ctime); else, where the directory,
    names, sizes, mtimes and a sample of bytes of every tensor are as remembered, taken for the
    same files, unless their mtimes were made equal by whoever packed them.
    Raises: StoreError when a model file cannot be read; OwnershipError when a weight file may not.
    """
    if survey.directory is None or survey.is_checkpoint:
        return Identity({}, {})
    question = _question(survey.directory)
    known = memory.recall("identities", question)
    if isinstance(known, dict) and known.get("stamps") == survey.stamps:
        return _identity_from(known)
    require_readable(survey)
    root = Path(survey.directory)
    try:
        model_files = {f.path: digest_file(root / f.path) for f in survey.model_files}
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None
    ways = _from_blobs(survey, model_files) | _from_sample(survey, model_files, memory)
    identity = Identity(model_files, ways)
    _keep(survey, identity, memory)
    return identity


def read_in_full(
    survey: Survey,
    identity: Identity,
    memory: Memory,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Identity:
    """Return `identity` with "blake3", reading every weight file once unless that is known.

    Raises: StoreError when a file cannot be read, or changed while it was read.
    """
    if "blake3" in identity.ways or survey.directory is None:
        return identity
    root = Path(survey.directory)
    ways = dict(identity.ways)
    try:
        contents: dict[str, str] = {}
        for file in survey.weights:
            contents[file.path], is_named_right = _read_one(root / file.path, file, on_bytes)
            if not is_named_right:
                # Written to through its link: the blob's name tells nothing any more.
                ways.pop("sha256", None)
            status = (root / file.path).stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise StoreError(f"{root / file.path}: changed while it was read")
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None
    ways["blake3"] = _digest(survey, contents, identity.model_files)
    complete = Identity(identity.model_files, ways)
    _keep(survey, complete, memory)
    memory.remember(
        "identities",
        _lookalike(survey, identity.model_files),
        {"sample": sample(survey), "blake3": ways["blake3"]},
    )
    return complete


def _read_one(path: Path, file: SourceFile, on_bytes: Callable[[int], None]) -> tuple[str, bool]:
    """Return the BLAKE3 of a weight file, and whether its blob is named by its own sha256."""
    if file.sha256 is None:
        return digest_file(path, on_bytes), True
    import hashlib  # noqa: PLC0415 - a hit hashes no weights

    named, ours = hashlib.sha256(), blake3()
    with path.open("rb", buffering=0) as opened:
        while piece := opened.read(PIECE_BYTES):
            named.update(piece)
            ours.update(piece)
            on_bytes(len(piece))
    return str(ours.hexdigest()), named.hexdigest() == file.sha256


def remember_word(
    survey: Survey,
    identity: Identity,
    revision: str | None,
    environ: Mapping[str, str],
    memory: Memory,
) -> None:
    """Keep what a word meant, for a day when its file system hangs."""
    if survey.directory is not None and not survey.is_checkpoint:
        entry: dict[str, Json] = {"directory": survey.directory, **_to_json(identity)}
        memory.remember("identities", _word_question(survey.word, revision, environ), entry)


def last_remembered(
    word: str, revision: str | None, environ: Mapping[str, str], memory: Memory
) -> Identity | None:
    """Return what the source was when this very word was last seen; for a source that hangs."""
    known = memory.recall("identities", _word_question(word, revision, environ))
    if not isinstance(known, dict):
        return None
    # A save or a full read since then may know more ways to say which model it is.
    latest = memory.recall("identities", _question(str(known["directory"])))
    return _identity_from(latest if isinstance(latest, dict) else known)


def _word_question(word: str, revision: str | None, environ: Mapping[str, str]) -> str:
    where = "" if os.path.isabs(word) else os.getcwd()
    return digest_json(["word", word, revision, where, str(hub_cache(environ))])


def _to_json(identity: Identity) -> dict[str, Json]:
    return {
        "model_files": cast("Json", dict(identity.model_files)),
        "ways": cast("Json", dict(identity.ways)),
    }


def _question(directory: str) -> str:
    return digest_json(["source", directory])


def _identity_from(known: Mapping[str, Json]) -> Identity:
    return Identity(
        cast("dict[str, str]", known["model_files"]), cast("dict[str, str]", known["ways"])
    )


def _keep(survey: Survey, identity: Identity, memory: Memory) -> None:
    entry: dict[str, Json] = {"stamps": survey.stamps, **_to_json(identity)}
    memory.remember("identities", _question(cast("str", survey.directory)), entry)


def _digest(survey: Survey, contents: Mapping[str, str], model_files: Mapping[str, str]) -> str:
    weights: list[Json] = [[f.path, f.size, contents[f.path]] for f in survey.weights]
    return digest_json([weights, cast("Json", dict(model_files))])


def _from_blobs(survey: Survey, model_files: Mapping[str, str]) -> dict[str, str]:
    if not survey.weights or not all(file.sha256 for file in survey.weights):
        return {}
    contents = {f.path: cast("str", f.sha256) for f in survey.weights}
    return {"sha256": _digest(survey, contents, model_files)}


def _lookalike(survey: Survey, model_files: Mapping[str, str]) -> str:
    # Whole seconds: an image layer keeps no finer mtime. The directory: a fine-tune beside it may
    # have been written in the same second.
    weights: list[Json] = [[f.path, f.size, f.mtime_ns // 10**9] for f in survey.weights]
    return digest_json(["lookalike", survey.directory, weights, cast("Json", dict(model_files))])


def _from_sample(survey: Survey, model_files: Mapping[str, str], memory: Memory) -> dict[str, str]:
    known = memory.recall("identities", _lookalike(survey, model_files))
    if any(file.mtime_ns < TRUE_MTIME_NS for file in survey.weights):
        return {}
    if not isinstance(known, dict) or known.get("sample") != sample(survey):
        return {}
    return {"blake3": cast("str", known["blake3"])}


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
