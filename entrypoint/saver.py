"""Saving a checkpoint from the source: a child with vLLM's executor alone, then commit.

This room never imports torch; the child is `entrypoint.vllm_plugin.save` in vLLM's interpreter.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from blake3 import blake3

from entrypoint import child, prover
from entrypoint.checkpoint import fragment
from entrypoint.checkpoint.digest import PIECE_BYTES, Json
from entrypoint.checkpoint.fragment import Fragment, fragment_name
from entrypoint.checkpoint.layout import checkpoint_name, layout_of
from entrypoint.checkpoint.manifest import INDEX, MANIFEST, FileEntry, Manifest, Source
from entrypoint.config import Settings
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import ProofError, SaveError, ShardbootError
from entrypoint.model import identity as model_identity
from entrypoint.model.identity import Identity
from entrypoint.model.survey import Survey, is_copied, survey
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.staging import Staging, write_all

SAVE_MODULE: Final = "entrypoint.vllm_plugin.save"
BY_THE_MODEL: Final = (
    *("save.data-parallel", "save.dtype", "save.meta-tensor", "save.online-quant"),
)
"""Refusals that come again as long as model, words and vLLM stay: no later boot tries in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything one save needs. `words` are the user's, all after `vllm serve`."""

    settings: Settings
    engine: Executable
    words: Sequence[str]
    environ: Mapping[str, str]
    resolution: Resolution
    source: Survey
    identity: Identity
    memory: Memory
    log_file: Path
    proof_needed: str
    say: Callable[[str], None]
    on_progress: Callable[[int], None]


def save(order: Order, store: DirectoryStore) -> Manifest:
    """Save, verify and commit a checkpoint into `store`; return its manifest as published.

    When this raises, the store is as it was, and no process of the save is left. The child's log
    stays in `order.log_file`. Raises: SaveError, StagingError, SpaceError, StoreError.
    """
    started = time.monotonic()
    provisional = checkpoint_name(order.resolution.model_word, order.resolution.key)
    with store.stage(provisional) as staging:
        reading = _Reading(order)
        reading.start()
        _run_child(order, staging)
        identity = reading.result()
        model_files = copy_model_files(order.source, staging)
        _check_unchanged(order)
        manifest, index_bytes = fragment.assemble(
            _fragments(staging, order.resolution),
            model_files,
            order.resolution.key._replace(model=identity.ways["blake3"]),
            Source(
                name=order.resolution.model_word,
                revision=order.source.revision,
                identity=identity.ways,
            ),
            save=_about(order, time.monotonic() - started),
            # Finer than a second: saves are told apart by the bytes of their manifests.
            created_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        )
        staging.write_file(INDEX, index_bytes)
        if order.proof_needed:
            manifest = manifest._replace(proof=_prove(order, staging, manifest))
        result = staging.commit(manifest)
    _forget_refusals(order, manifest)
    return manifest.renamed(result.name)


def _prove(order: Order, staging: Staging, manifest: Manifest) -> dict[str, Json]:
    """Prove what lies in staging, before it gets a name; the loader needs a manifest for that.

    Raises: ProofError, after the key has been rejected, so that no boot tries the same again.
    """
    order.say(f"{manifest.name}: {order.proof_needed}, so it is proved before it is served")
    bench = prover.Bench(
        engine=order.engine,
        words=order.words,
        environ=order.environ,
        resolution=order.resolution,
        work=staging.path,
        logs=order.log_file.parent,
        timeout=order.settings.save_timeout,
        say=order.say,
    )
    source = prover.read_evidence(staging.path, "source", manifest.layout.ranks)
    staging.write_file(MANIFEST, manifest.encode())
    try:
        return prover.prove(bench, staging.path, manifest, source)
    except ProofError as error:
        if error.reason == ProofError.reason:
            key = manifest.key.digest
            Rejections(order.settings.state_dir).add(key, "unproven", str(error))
        raise
    finally:
        (staging.path / MANIFEST).unlink()


class _Reading(threading.Thread):
    """Reads the source in full for its identity while the child imports vLLM and loads it."""

    def __init__(self, order: Order) -> None:
        super().__init__(daemon=True, name="identity")
        self._order = order
        self._identity: Identity | None = None
        self._error: ShardbootError | None = None

    def run(self) -> None:
        order = self._order
        try:
            self._identity = model_identity.read_in_full(order.source, order.identity, order.memory)
        except ShardbootError as error:
            self._error = error

    def result(self) -> Identity:
        self.join()
        if self._error is not None:
            raise self._error
        if self._identity is None:
            msg = "the source's identity could not be taken"
            raise SaveError(msg)
        return self._identity


def _run_child(order: Order, staging: Staging) -> None:
    settings = order.settings
    if order.proof_needed:
        environ = prover.environ_for(order.environ, "source")
    else:
        environ = with_plugin(order.environ)
    with child.open_log(order.log_file) as log:
        outcome = child.ask(
            [order.engine.interpreter, "-P", "-m", SAVE_MODULE],
            {
                "words": list(order.words),
                "staging": str(staging.path),
                "size_per_file": settings.size_per_file,
                "file_mode": settings.file_mode,
                "record": bool(order.proof_needed),
            },
            environ=environ,
            log=log,
            timeout=settings.save_timeout,
            on_tick=lambda: order.on_progress(_bytes_in(staging.path)),
        )
        last_words = child.last_lines(log)
    if outcome.timed_out:
        msg = f"the save took longer than {settings.save_timeout:.0f} s and was ended"
        hint = f"see {order.log_file}, or raise --save-timeout"
        raise SaveError(msg, reason="save.timeout", hint=hint)
    answer = outcome.answer if isinstance(outcome.answer, dict) else {}
    if answer.get("status") == "refused":
        _remember_refusal(order, str(answer["reason"]), str(answer["message"]))
        raise SaveError(str(answer["message"]), reason=str(answer["reason"]))
    if answer.get("status") != "ok":
        msg = f"the save child ended with status {outcome.status}: {last_words}"
        raise SaveError(msg, hint=f"its whole log is {order.log_file}")


def _remember_refusal(order: Order, reason: str, message: str) -> None:
    if reason in BY_THE_MODEL:
        key = model_identity.key_by_config(order.resolution.key, order.identity)
        Rejections(order.settings.state_dir).add(key, reason, message)


def _forget_refusals(order: Order, manifest: Manifest) -> None:
    """Take back what earlier tries found: this one went well."""
    rejections = Rejections(order.settings.state_dir)
    by_config = model_identity.key_by_config(order.resolution.key, order.identity)
    for digest in (by_config, manifest.key.digest):
        # Only for the next boot's sake; the checkpoint is there either way.
        with contextlib.suppress(OSError):
            rejections.remove(digest)


def _bytes_in(directory: Path) -> int:
    count = 0
    for entry in os.scandir(directory):
        # Fragments are renamed into place meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += entry.stat().st_size
    return count


def _fragments(staging: Staging, resolution: Resolution) -> list[Fragment]:
    fragments = []
    for rank in layout_of(resolution.key).ranks:
        try:
            fragments.append(fragment.decode((staging.path / fragment_name(rank)).read_bytes()))
        except FileNotFoundError:
            msg = f"rank {rank} wrote no fragment"
            raise SaveError(msg) from None
    return fragments


def copy_model_files(source: Survey, staging: Staging) -> list[FileEntry]:
    """Copy the source's non-weight files, links dereferenced; return their entries.

    Raises: SaveError when one cannot be read; StagingError, SpaceError.
    """
    directory = Path(cast("str", source.directory))
    paths = [file.path for file in source.model_files if is_copied(file.path)]
    return [_copy_one(directory, path, staging) for path in paths]


def _copy_one(directory: Path, path: str, staging: Staging) -> FileEntry:
    hasher = blake3()
    size = 0
    descriptor = staging.create(path)
    try:
        for piece in _pieces(directory / path):
            hasher.update(piece)
            size += len(piece)
            with staging.writing(path):
                write_all(descriptor, piece)
        with staging.writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(path=path, size=size, blake3=str(hasher.hexdigest()), role="model")


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise SaveError(f"{path}: cannot be copied: {error.strerror}") from None


def _check_unchanged(order: Order) -> None:
    """Refuse a save whose source moved under it: its identity would name other bytes."""
    now = survey(order.source.word, order.resolution.revision, order.environ, seconds=60.0)
    if now.stamps != order.source.stamps:
        msg = f"{order.source.directory}: the source changed while it was saved"
        raise SaveError(msg, hint="boot again when nothing writes to it")


def _about(order: Order, seconds: float) -> dict[str, Json]:
    return {
        "seconds": round(seconds, 1),
        "host": os.uname().nodename,
        "vllm": order.resolution.key.vllm,
        "plugin": order.resolution.plugin,
        "source_bytes": sum(file.size for file in order.source.weights),
    }
