"""Which model the source is, wherever its files lie.

Two ways to say it: "sha256", from the names of the hub's blobs, without reading a weight; and
"blake3", over every weight file's whole content. Both take in the bytes of all model files, since
another tokenizer or template under the same weights is another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from blake3 import blake3

from entrypoint.checkpoint.digest import Json, digest_file, digest_json
from entrypoint.errors import DamagedError, StoreError
from entrypoint.model.survey import SourceFile, Survey
from entrypoint.state.memory import Memory

SAMPLE_BYTES: Final = 64


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


def recall(survey: Survey, memory: Memory) -> Identity:
    """Return what is known of the source without reading a weight byte; keeps what it learns.

    Remembered under every file's (path, size, mtime, inode, ctime); else, where names, sizes,
    mtimes and a sample of bytes of every tensor are as remembered, taken for the same files.
    Raises: StoreError when a model file cannot be read.
    """
    if survey.directory is None or survey.is_checkpoint:
        return Identity({}, {})
    question = _question(survey.directory)
    known = memory.recall("identities", question)
    if isinstance(known, dict) and known.get("stamps") == survey.stamps:
        return _identity_from(known)
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
    try:
        contents: dict[str, str] = {}
        for file in survey.weights:
            contents[file.path] = digest_file(root / file.path, on_bytes)
            status = (root / file.path).stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise StoreError(f"{root / file.path}: changed while it was read")
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None
    ways = {**identity.ways, "blake3": _digest(survey, contents, identity.model_files)}
    complete = Identity(identity.model_files, ways)
    _keep(survey, complete, memory)
    memory.remember(
        "identities",
        _lookalike(survey, identity.model_files),
        {"sample": sample(survey), "blake3": ways["blake3"]},
    )
    return complete


def last_remembered(word: str, memory: Memory) -> Identity | None:
    """Return what the source was when it was last seen; for a source that hangs."""
    known = memory.recall("identities", _question(word))
    return _identity_from(known) if isinstance(known, dict) and "stamps" in known else None


def _question(directory: str) -> str:
    return digest_json(["source", directory])


def _identity_from(known: Mapping[str, Json]) -> Identity:
    return Identity(
        cast("dict[str, str]", known["model_files"]), cast("dict[str, str]", known["ways"])
    )


def _keep(survey: Survey, identity: Identity, memory: Memory) -> None:
    entry: dict[str, Json] = {
        "stamps": survey.stamps,
        "model_files": cast("Json", dict(identity.model_files)),
        "ways": cast("Json", dict(identity.ways)),
    }
    memory.remember("identities", _question(cast("str", survey.directory)), entry)
    if survey.word != survey.directory:
        memory.remember("identities", _question(survey.word), entry)


def _digest(survey: Survey, contents: Mapping[str, str], model_files: Mapping[str, str]) -> str:
    weights: list[Json] = [[f.path, f.size, contents[f.path]] for f in survey.weights]
    return digest_json([weights, cast("Json", dict(model_files))])


def _from_blobs(survey: Survey, model_files: Mapping[str, str]) -> dict[str, str]:
    if not survey.weights or not all(file.sha256 for file in survey.weights):
        return {}
    contents = {f.path: cast("str", f.sha256) for f in survey.weights}
    return {"sha256": _digest(survey, contents, model_files)}


def _lookalike(survey: Survey, model_files: Mapping[str, str]) -> str:
    # Whole seconds: an image layer keeps no finer mtime.
    weights: list[Json] = [[f.path, f.size, f.mtime_ns // 10**9] for f in survey.weights]
    return digest_json(["lookalike", weights, cast("Json", dict(model_files))])


def _from_sample(survey: Survey, model_files: Mapping[str, str], memory: Memory) -> dict[str, str]:
    known = memory.recall("identities", _lookalike(survey, model_files))
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
