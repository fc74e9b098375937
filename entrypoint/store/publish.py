"""The second half of a commit: the manifest is written, and staging gets its published name."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.entry import HAVE, FileEntry
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.inspect import ranks_held, ranks_in
from entrypoint.checkpoint.layout import generation_of, with_generation
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from entrypoint.errors import StagingError
from entrypoint.store import trash, tree

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_LOOKS = 8
"""A name can be taken and given up by others while we look; this often is enough."""


class CommitResult(NamedTuple):
    """The checkpoint's name now, and whether we put it there or found an equal one."""

    name: str
    outcome: Literal["committed", "existed"]


def publish(
    root: Path,
    staged: Path,
    manifest: Manifest,
    held: Collection[int],
    modes: tuple[int, int],
    *,
    repairs: bool = False,
) -> CommitResult:
    """Write the manifest into `staged` and rename it to the first name that is free for it.

    An equal and complete checkpoint under a name wins over ours; an equal but damaged one, or one
    of other ranks, goes to the trash, where its running readers keep their inodes; a different
    one keeps its name. One that `repairs` knows that an equal one is damaged, whatever its sizes.
    Raises: StagingError; OSError.
    """
    ranks = set(held)
    base, first = generation_of(manifest.name)
    for generation in itertools.count(first):
        candidate = manifest.renamed(with_generation(base, generation))
        outcome = _claim(root, staged, candidate, ranks, modes, repairs=repairs)
        if outcome is not None:
            return CommitResult(candidate.name, outcome)
    raise AssertionError  # pragma: no cover - count() does not end


def _claim(
    root: Path,
    staged: Path,
    candidate: Manifest,
    held: set[int],
    modes: tuple[int, int],
    *,
    repairs: bool,
) -> Literal["committed", "existed"] | None:
    dir_mode, file_mode = modes
    target = root / candidate.name
    encoded = candidate.encode()
    for _ in range(_LOOKS):
        standing = _standing(target, encoded, candidate.files_for(held), held)
        if standing == "equal" and not repairs:
            return "existed"
        if standing == "other":
            return None
        is_replaced = standing != "free"
        if is_replaced:
            held |= _adopt(target, staged, candidate, held)
        if is_replaced and repairs:
            _keep_manifest(target, staged)
        _say_ranks(staged, candidate, held, file_mode)
        if _manifest_bytes(staged) == encoded:
            tree.sync_directory(staged)
        else:
            _write(staged, MANIFEST, encoded, file_mode)
        if is_replaced:
            published = _replace(root, staged, target, dir_mode)
        else:
            published = _rename(staged, target)
        if published:
            tree.sync_directory(root)
            return "committed"
    raise StagingError(f"{target}: the name is taken and given up again without end")


def _say_ranks(staged: Path, manifest: Manifest, held: set[int], file_mode: int) -> None:
    if held == set(manifest.layout.ranks):
        (staged / HAVE).unlink(missing_ok=True)
        return
    ranks: list[Json] = [*sorted(held)]
    _write(staged, HAVE, canonical({"ranks": ranks}) + b"\n", file_mode)


def _adopt(target: Path, staged: Path, candidate: Manifest, held: set[int]) -> set[int]:
    """Link the shards of ranks that only `target` holds into `staged`, and return those ranks.

    Two servers on one node may hold different ranks, and must not throw out each other's. The
    manifest is linked as well: it is the same file then, and the locks on it still count.
    """
    more = set(ranks_in(target, candidate)) - held
    entries = candidate.files_for(more)
    if not more or not is_whole(target, entries, more):
        return set()
    ours = {entry.path for entry in candidate.files_for(held)}
    theirs = [entry.path for entry in entries if entry.path not in ours]
    (staged / MANIFEST).unlink(missing_ok=True)
    try:
        # Opened once: another save may take the name meanwhile, and has other bytes.
        directory = os.open(target, tree.DIRECTORY)
        try:
            for path in (MANIFEST, *theirs):
                os.link(path, staged / path, src_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)
        is_same = _manifest_bytes(staged) == candidate.encode()
    except OSError:
        is_same = False
    if is_same:
        # What was just made is young, whenever its manifest was written.
        with contextlib.suppress(OSError):
            os.utime(staged / MANIFEST)
        return more
    # No links on this file system, or a race lost: ours alone is complete for its ranks.
    for path in (MANIFEST, *theirs):
        (staged / path).unlink(missing_ok=True)
    return set()


def _keep_manifest(target: Path, staged: Path) -> None:
    """Have the very file for a manifest that `target` has, so that locks on it still count."""
    (staged / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.link(target / MANIFEST, staged / MANIFEST, follow_symlinks=False)


def _replace(root: Path, staged: Path, target: Path, dir_mode: int) -> bool:
    """Put `staged` where `target` is, which goes to the trash; False when others were faster.

    In one step where the file system can. Else who opens files by their paths, as another node's
    rank while it loads, finds none between two renames, and a kill there leaves it in the trash.
    Raises: OSError.
    """
    from entrypoint.store import writeback  # noqa: PLC0415 - ctypes, and most names are free

    unique = f"{target.name[:200]}.{os.urandom(4).hex()}"
    try:
        writeback.exchange(staged, target)
    except OSError:
        return _replace_in_two(root, staged, target, unique, dir_mode)
    # What had the name lies where we built. If it cannot be moved, it is removed as staging is.
    with contextlib.suppress(OSError):
        trash.discard(root, staged, unique, dir_mode)
    return True


def _replace_in_two(root: Path, staged: Path, target: Path, unique: str, dir_mode: int) -> bool:
    try:
        trash.discard(root, target, unique, dir_mode)
    except FileNotFoundError:
        return _rename(staged, target)
    try:
        return _rename(staged, target)
    except BaseException:
        with contextlib.suppress(OSError):
            (root / trash.TRASH / unique).rename(target)
        raise


def _rename(staged: Path, target: Path) -> bool:
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _standing(
    target: Path, encoded: bytes, entries: Iterable[FileEntry], held: Collection[int]
) -> Literal["free", "equal", "damaged", "other"]:
    found = _manifest_bytes(target)
    if found is None and not os.path.lexists(target):
        return "free"
    # Between the two looks somebody may have published it.
    found = found or _manifest_bytes(target)
    if found != encoded:
        return "other"
    return "equal" if is_whole(target, entries, held) else "damaged"


def _manifest_bytes(target: Path) -> bytes | None:
    try:
        return read_bounded(target / MANIFEST, MAX_MANIFEST_BYTES)
    except (OSError, ValueError):
        return None


def is_whole(directory: Path, entries: Iterable[FileEntry], ranks: Collection[int]) -> bool:
    """Tell whether a published directory holds the listed files with their sizes, for `ranks`.

    Raises: OSError when a file cannot be looked at; that it is missing is an answer.
    """
    have = ranks_held(directory)
    if have is not None and not set(ranks) <= have:
        return False
    for entry in entries:
        try:
            status = (directory / entry.path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return False
    return True


def _write(staged: Path, name: str, data: bytes, mode: int) -> None:
    temporary = staged / f".{name}"
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        tree.set_mode(descriptor, mode)
        tree.write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(staged / name)
    tree.sync_directory(staged)
