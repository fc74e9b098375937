"""A checkpoint of a model that is not on this node: its model files stand in for the source's.

vLLM reads a model's config to understand the words. Where the source is elsewhere, a checkpoint of
the very same model has that config: one saved from the same full commit, or one that the operator
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.layout import model_in_name
from entrypoint.checkpoint.manifest import Manifest, decode
from entrypoint.errors import ManifestError, NotFoundError, StoreError
from entrypoint.model.source import StandIn
from entrypoint.store.base import CheckpointStore


def find(
    stores: Iterable[CheckpointStore], named: str | None, word: str, commit: str | None
) -> StandIn | None:
    """Return the first checkpoint, in the order of `stores`, of the model that is meant.

    That is the one called `named`, or one saved from `word` at the full `commit`. What cannot be
    read is passed over.
    """
    if named is None and commit is None:
        return None
    for store in stores:
        for manifest in _manifests(store, named, word):
            source = manifest.source
            if named is not None or (source.name, source.revision) == (word, commit):
                return _of(store, manifest)
    return None


def _of(store: CheckpointStore, manifest: Manifest) -> StandIn:
    entries = [entry for entry in manifest.files if entry.role == "model"]
    return StandIn(
        name=manifest.name,
        model_files={entry.path: entry.blake3 for entry in entries},
        laid_out=lambda: _laid_out(store, manifest, entries),
    )


@contextmanager
def _laid_out(
    store: CheckpointStore, manifest: Manifest, entries: Sequence[FileEntry]
) -> Iterator[str]:
    """Yield a directory with `entries` and nothing else, verified; gone afterwards.

    Raises: DamagedError; StoreError; StagingError.
    """
    import tempfile  # noqa: PLC0415 - only when vLLM is asked

    from entrypoint.store import staging, transfer  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory(prefix="shardboot-model.") as directory,
        staging.begin(Path(directory), manifest.name) as staged,
    ):
        transfer.copy(store, manifest.name, manifest, entries, staged)
        yield str(staged.path)


def _manifests(store: CheckpointStore, named: str | None, word: str) -> Iterator[Manifest]:
    try:
        names = store.names()
    except StoreError:
        return
    for name in names:
        if name == named or (named is None and name.startswith(model_in_name(word))):
            try:
                manifest = decode(store.read_manifest(name))
            except (ManifestError, NotFoundError, StoreError, ValueError):
                continue
            if manifest.name == name:
                yield manifest
