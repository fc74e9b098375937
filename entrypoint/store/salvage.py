"""Taking what is sound of a damaged checkpoint into the staging that is to replace it, by links.

A linked file is the same file under both names: nothing of it is copied, and no byte of it is ever
written, so that whoever has it open notices nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.store import tree
from entrypoint.store.staging import Staging

_PROBE = ".linked"


def can_link(staging: Staging, directory: Path) -> bool:
    """Tell whether files of a published `directory` can be linked into `staging`, its manifest's.

    Not on every file system, nor where another user owns them (protected_hardlinks, proc(5)).
    """
    try:
        os.link(directory / MANIFEST, staging.path / _PROBE, follow_symlinks=False)
        (staging.path / _PROBE).unlink()
    except OSError:
        return False
    return True


def salvage(staging: Staging, directory: Path, entries: Iterable[FileEntry]) -> int:
    """Link the files of `entries` that have their size into `staging`; return their bytes.

    Whether they are what they should be is for the copy to tell, which reads them. What is in
    staging already stays. Raises: StagingError; SpaceError.
    """
    linked = 0
    with staging.writing(""):
        source = os.open(directory, tree.DIRECTORY)
        try:
            for entry in entries:
                # Gone or unreadable, it is copied.
                with contextlib.suppress(OSError):
                    linked += _link(source, staging, entry)
        finally:
            os.close(source)
    staging.held_bytes += linked
    return linked


def _link(source: int, staging: Staging, entry: FileEntry) -> int:
    *parents, name = entry.path.split("/")
    with (
        tree.descend(source, tuple(parents)) as here,
        tree.descend(staging.directory, tuple(parents), staging.dir_mode) as there,
    ):
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        # What is not whole would be written to; an empty file is written faster than linked.
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size == entry.size:
            return 0
        os.link(name, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
    return entry.size
