"""Which model the source is, wherever its files lie.

Two ways to say it: "sha256", from the names of the hub's blobs, without reading a weight; and
"blake3", over every weight file's whole content. Both take in the bytes of all model files, since
another tokenizer or template under the same weights is another model.

A blob's name is taken at its word until its file moves under it, or a full read finds it wrong.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from blake3 import blake3

from entrypoint.checkpoint.digest import PIECE_BYTES, Json, digest_file, digest_json
from entrypoint.checkpoint.key import Key
from entrypoint.errors import StoreError
from entrypoint.model import lookalike
from entrypoint.model.contents import SourceFile
from entrypoint.model.hub import hub_cache
from entrypoint.model.survey import Survey
from entrypoint.state.memory import Memory


class Identity(NamedTuple):
    """The source as known so far: digests of its model files, and of the whole by each way.

    `ways` holds "sha256" and "blake3" as far as they are known without reading weights; beside
    "blake3" the other one is no word of the hub's, but was found by a full read as well.
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


def remembered(survey: Survey, memory: Memory) -> Identity | None:
    """Return what is remembered of the source under its stamps, or None.

    That is every file's (path, size, mtime, inode, ctime), unless other files may have the same
    (`Survey.undated`).
    """
    if survey.directory is None or survey.is_checkpoint:
        return Identity({}, {})
    known = _known(survey, memory)
    if known.get("stamps") != survey.stamps or survey.undated == "":
        return None
    return _identity_from(known)


def learn(survey: Survey, memory: Memory) -> Identity:
    """Return what can be known of a source without reading a weight in full; keeps what it learns.

    By `lookalike`, else by the names of the hub's blobs. Where some of it may not be read, nothing
    but the other model files is known. Raises: StoreError when a model file cannot be read.
    """
    root = Path(cast("str", survey.directory))
    model_files = {}
    for file in survey.model_files:
        try:
            model_files[file.path] = digest_file(root / file.path)
        except PermissionError:
            if survey.denied is None:
                raise StoreError(f"{root / file.path}: cannot be read") from None
        except OSError as error:
            raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if survey.denied is not None:
        return Identity(model_files, {})
    named = _named(survey, _known(survey, memory))
    ways = lookalike.recall(survey, model_files, memory) or _by_name(survey, named, model_files)
    identity = Identity(model_files, ways)
    _keep(survey, identity, named, memory)
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
    contents: dict[str, str] = {}
    named: dict[str, Json] = {}
    try:
        for file in survey.weights:
            contents[file.path], is_named_right = _read_one(root / file.path, file, on_bytes)
            if file.sha256 is not None:
                # Else written to through its link: the blob's name tells nothing any more.
                named[file.path] = [file.sha256, list(file.stamp) if is_named_right else None]
            status = (root / file.path).stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise StoreError(f"{root / file.path}: changed while it was read")
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None
    ways = {"blake3": _digest(survey, contents, identity.model_files)}
    ways |= _by_name(survey, named, identity.model_files)
    complete = Identity(identity.model_files, ways)
    _keep(survey, complete, named, memory)
    lookalike.remember(survey, identity.model_files, ways, memory)
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


def _known(survey: Survey, memory: Memory) -> Mapping[str, Json]:
    known = memory.recall("identities", _question(cast("str", survey.directory)))
    return known if isinstance(known, dict) else {}


def _keep(survey: Survey, identity: Identity, named: Mapping[str, Json], memory: Memory) -> None:
    entry: dict[str, Json] = {"stamps": survey.stamps, **_to_json(identity)}
    entry["named"] = cast("Json", dict(named))
    memory.remember("identities", _question(cast("str", survey.directory)), entry)


def _digest(survey: Survey, contents: Mapping[str, str], model_files: Mapping[str, str]) -> str:
    weights: list[Json] = [[f.path, f.size, contents[f.path]] for f in survey.weights]
    return digest_json([weights, cast("Json", dict(model_files))])


def _named(survey: Survey, known: Mapping[str, Json]) -> dict[str, Json]:
    """Return each blob's [name, stamp for which it stands], by the path of the weight.

    That is the first stamp seen by that name; None where the name is doubtful until it was read.
    """
    before = cast("Mapping[str, list[Json]]", known.get("named", {}))
    named: dict[str, Json] = {}
    for file in survey.weights:
        earlier = before.get(file.path)
        if earlier is not None and earlier[0] == file.sha256:
            named[file.path] = earlier
        elif file.sha256 is not None:
            named[file.path] = [file.sha256, None if file.is_later else list(file.stamp)]
    return named


def _by_name(
    survey: Survey, named: Mapping[str, Json], model_files: Mapping[str, str]
) -> dict[str, str]:
    """Return "sha256" where every weight is a blob that has not moved since it had that name."""
    if not survey.weights:
        return {}
    for file in survey.weights:
        if named.get(file.path) != [file.sha256, list(file.stamp)]:
            return {}
    contents = {f.path: cast("str", f.sha256) for f in survey.weights}
    return {"sha256": _digest(survey, contents, model_files)}
