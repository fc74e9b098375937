"""Making the stores' directories ready for the service user, by descriptors all the way down.

Whoever may change a directory can put anything in the place of what lies below. So root walks from
`/`, one open directory after the other, says who else could, and follows no link that others may
have put there. It gives away what it has just made, or what is empty.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, get_args

from entrypoint.errors import OwnershipError
from entrypoint.privilege.user import ROOT, User
from entrypoint.state.memory import Subject
from entrypoint.state.places import Place

_READ: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASS: Final = _READ | os.O_PATH
_MOST_STEPS: Final = 1000
"""Links may go round for ever."""

_REFUSED: Final = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOTSUP, errno.EINVAL)
"""What file systems answer where root is nobody (root_squash), or where nothing is changed."""

_ALL_MAY_WRITE: Final = stat.S_IWOTH

SUBDIRECTORIES: Final = (
    *(".staging", ".trash", ".pins", ".leases"),
    *get_args(Place),
    *(f"memory/{subject}" for subject in get_args(Subject)),
    *("caches/.staging", "caches/.trash"),
)
"""What may never be a link: all that is deleted, or made, lies in one of these."""

Doubt = Callable[[str, bool], None]
"""Hears who else could change the way to a directory, and whether they have put a link there."""


class Untrusted(Exception):  # noqa: N818 - no failure: it is said, and root stays away
    """Others may have put there what root would have to touch."""


def prepare(directory: Path, user: User, mode: int, say: Callable[[str], None]) -> None:
    """Make sure that `directory` exists and belongs to `user`; touch nothing below it.

    A directory that was there is given away only if it is empty, as a new volume is: what lies in
    another one would stay somebody else's. It keeps its mode, but that not everybody may write.

    Only what differs is changed. What stands in the way is said and tolerated: whether the user
    can work there is found out by working there.
    Raises: OwnershipError where a file or a link is in the way.
    """
    doubts: list[str] = []

    def doubt(text: str, is_link: bool) -> None:
        if is_link:
            raise Untrusted(text)
        doubts.append(text)
        say(text)

    try:
        parent = walk(directory.parent, user, doubt, makes=True)
        try:
            planted = bool(doubts or writers(os.fstat(parent), user))
            _ready(parent, directory, user, mode, say, may_be_planted=planted)
        finally:
            os.close(parent)
    except Untrusted as why:
        say(f"{directory}: root touches nothing there: {why}")
    except OSError as error:
        if error.errno not in _REFUSED:
            msg = f"{directory}: cannot be made or opened: {error.strerror}"
            hint = "mount a directory there, or name another one"
            raise OwnershipError(msg, hint=hint) from None
        say(f"{directory}: root can do nothing there: {error.strerror}")


def check(directory: Path, say: Callable[[str], None]) -> None:
    """For root that stays root: say who else could change what lies in `directory`.

    Nothing is changed. Raises: OwnershipError where somebody else may have put a link that root
    would follow.
    """

    def doubt(text: str, is_link: bool) -> None:
        if is_link:
            hint = "root does not follow it: remove it, or name a --user"
            raise OwnershipError(text, hint=hint)
        say(text)

    try:
        there = walk(directory, ROOT, doubt, makes=False)
    except OSError:
        # It is not there yet, or will be found out by working there.
        return
    try:
        status = os.fstat(there)
        if _guards_names(status, ROOT) and (why := writers(status, ROOT)):
            doubt(_exposed(str(directory), why), False)
        for name in SUBDIRECTORIES:
            if _is_link(name, there):
                doubt(f"{directory}/{name}: expected a directory, found a link", True)
    finally:
        os.close(there)


def walk(path: Path, user: User, doubt: Doubt, *, makes: bool) -> int:
    """Return an open descriptor of the directory `path`, good for what lies below and no more.

    `doubt` hears of every directory on the way that is not root's or the user's, or that others
    may write in, unless it is sticky; and of links where anybody but root may have put them.
    Missing directories are made where this `makes` them. Raises: OSError, and what `doubt` does.
    """
    left, where = [*reversed(path.parts[1:])], "/"
    here = os.open("/", _PASS)
    try:
        for _ in range(_MOST_STEPS):
            status = os.fstat(here)
            why = writers(status, user)
            if why and not _guards_names(status, user):
                doubt(_exposed(where, why), False)
            if not left:
                return here
            name = left.pop()
            beyond = os.path.join(where, name)
            if not _is_link(name, here):
                below, where = _enter(here, name, makes=makes), beyond
            else:
                if status.st_uid != 0 or writers(status, ROOT):
                    doubt(f"{beyond}: a link, which others may have put there", True)
                target = os.readlink(name, dir_fd=here)
                left += reversed([part for part in target.split("/") if part])
                below = os.open("/" if target.startswith("/") else ".", _PASS, dir_fd=here)
                where = "/" if target.startswith("/") else where
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    os.close(here)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def writers(status: os.stat_result, user: User) -> str:
    """Return who but root and the user may write in a directory, or ""."""
    if status.st_uid not in (0, user.uid):
        return f"it belongs to uid {status.st_uid}{_stand_in_for_others(status.st_uid)}"
    if status.st_mode & _ALL_MAY_WRITE:
        return f"everybody may write in it (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (0, user.gid):
        return f"group {status.st_gid} may write in it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _stand_in_for_others(uid: int) -> str:
    """Say so where it is the uid that all have whom this user namespace does not map."""
    try:
        overflow = Path("/proc/sys/kernel/overflowuid").read_bytes()
        first, *more = Path("/proc/self/uid_map").read_bytes().splitlines()
    except (OSError, ValueError):
        return ""
    if more or first.split() != [b"0", b"0", b"4294967295"]:
        return ", as any that this user namespace does not map" if int(overflow) == uid else ""
    return ""


def _exposed(where: str, why: str) -> str:
    return f"{where}: others could exchange what lies there: {why}"


def _guards_names(status: os.stat_result, user: User) -> bool:
    """Whether it is sticky: others may add names, but take none away that is not their own."""
    return status.st_uid in (0, user.uid) and bool(status.st_mode & stat.S_ISVTX)


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _enter(here: int, name: str, *, makes: bool) -> int:
    try:
        return os.open(name, _PASS, dir_fd=here)
    except FileNotFoundError:
        if not makes:
            raise
    made, below = _make(here, name)
    if made:
        # Whatever the umask: the user must pass here.
        os.fchmod(below, 0o755)
    return below


def _make(parent: int, name: str) -> tuple[bool, int]:
    """Return whether a directory had to be made, and is root's, and a descriptor of it.

    Raises: OSError; Untrusted.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        made = True
    except FileExistsError:
        made = False
    descriptor = os.open(name, _READ, dir_fd=parent)
    if made and os.listdir(descriptor):
        os.close(descriptor)
        # Where others may write, for any that lies there, a secret one of root's, too.
        raise Untrusted(f"{name} was exchanged when it had just been made")
    # Where root is nobody, what it makes is not root's.
    return made and os.fstat(descriptor).st_uid == os.geteuid(), descriptor


def _ready(
    parent: int,
    directory: Path,
    user: User,
    mode: int,
    say: Callable[[str], None],
    *,
    may_be_planted: bool,
) -> None:
    made, descriptor = _make(parent, directory.name)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (0, user.uid) and may_be_planted:
            raise Untrusted(f"uid {owner} has made it")
        is_given = _give(descriptor, directory, user, mode if made else None, say)
        if is_given and (why := writers(os.fstat(descriptor), user)):
            say(_exposed(str(directory), why))
    finally:
        os.close(descriptor)


def _give(
    descriptor: int, directory: Path, user: User, mode: int | None, say: Callable[[str], None]
) -> bool:
    """Give a directory to the user, with `mode` if it is new; return False, and say so, if not."""
    before = os.fstat(descriptor)
    try:
        if before.st_uid != user.uid:
            if set(os.listdir(descriptor)) - {"lost+found"}:
                # A wrong path must not give /srv away.
                mend = "to write there, chown it once with all that lies in it"
                say(f"{directory}: stays with uid {before.st_uid}, since it is not empty; {mend}")
                return False
            # What is setgid keeps its group: that is what it is for.
            keeps = before.st_mode & stat.S_ISGID and before.st_gid != 0
            os.fchown(descriptor, user.uid, -1 if keeps else user.gid)
            if mode is None and before.st_mode & _ALL_MAY_WRITE:
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & ~_ALL_MAY_WRITE)
        if mode is not None:
            # Not before: chown(2) may clear the setgid bit.
            os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        say(f"{directory}: stays with uid {before.st_uid}: {error.strerror}")
        return False
    return True
