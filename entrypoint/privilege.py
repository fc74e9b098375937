"""Everything that needs root, in one room: resolve a user, give it the stores, become it.

Root prepares the stores and the state directory, then is gone for good: whatever runs model or
vLLM code, and whatever writes into a store, already is the service user.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import errno
import grp
import os
import pwd
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

from entrypoint.errors import OwnershipError, PrivilegeError


class User(NamedTuple):
    """Who vLLM will run as: ids, supplementary groups, and the names that its environment gets."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str


def resolve_user(word: str) -> User:
    """Return the user for `UID[:GID]`, `NAME` or `NAME:GROUP`, as chown and docker read them.

    An unknown number is allowed (no passwd entry, as on OpenShift); an unknown name is not.
    Raises: PrivilegeError.
    """
    who, _, group = word.partition(":")
    entry = _passwd(who)
    if entry is None and not _is_id(who):
        msg = f"--user {word}: there is no user {who!r} here"
        raise PrivilegeError(msg, hint="name a user of this system, or numbers such as 2000:2000")
    uid = entry.pw_uid if entry else int(who)
    gid = _group_id(group, word) if group else (entry.pw_gid if entry else uid)
    # With a group named, only that group, as `docker run --user` does.
    groups = (gid,) if group or not entry else tuple(os.getgrouplist(entry.pw_name, gid))
    name = entry.pw_name if entry else str(uid)
    return User(uid, gid, groups, name, entry.pw_dir if entry else "/")


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) < 2**32 - 1


def _passwd(who: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(who)) if _is_id(who) else pwd.getpwnam(who)
    except KeyError:
        return None


def _group_id(group: str, word: str) -> int:
    if _is_id(group):
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        msg = f"--user {word}: there is no group {group!r} here"
        raise PrivilegeError(msg, hint="name a group of this system, or give its number") from None


def prepare(directory: Path, user: User, mode: int, say: Callable[[str], None]) -> None:
    """Make sure that `directory` exists and belongs to `user`; touch nothing below it.

    A directory that was there is given away only if it is empty, as a new volume is, or was used
    as a store or state directory before.

    Only what differs is changed. A file system that refuses (root_squash, read-only) is said and
    tolerated: whether the user can work there is found out by working there.
    Raises: OwnershipError when the directory can neither be made nor used.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        made = _make(directory, mode)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.EROFS:
            say(f"{directory}: read-only file system; nothing will be kept there")
            return
        msg = f"{directory}: cannot be made or opened: {error.strerror}"
        raise OwnershipError(msg, hint="mount a directory there, or name another one") from None
    try:
        _give(descriptor, directory, user, mode if made else None, say)
    finally:
        os.close(descriptor)


def _make(directory: Path, mode: int) -> bool:
    try:
        directory.mkdir(mode=mode)
    except FileExistsError:
        return False
    return True


def _give(
    descriptor: int, directory: Path, user: User, mode: int | None, say: Callable[[str], None]
) -> None:
    status = os.fstat(descriptor)
    try:
        if status.st_uid != user.uid:
            if mode is None and not _may_be_given(descriptor):
                # A wrong path must not give /srv away.
                what = "it is neither empty nor a store or state directory"
                say(f"{directory}: stays with uid {status.st_uid}, since {what}")
                return
            os.fchown(descriptor, user.uid, user.gid)
        if mode is not None:
            # After chown, which clears the setgid bit (chown(2)).
            os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EROFS, errno.ENOTSUP, errno.EINVAL):
            raise
        say(f"{directory}: stays with uid {status.st_uid}: {error.strerror}")


OURS: Final = frozenset({".staging", ".trash", "ledger.jsonl", "memory"})


def _may_be_given(descriptor: int) -> bool:
    names = set(os.listdir(descriptor)) - {"lost+found"}
    return not names or bool(names & OURS)


def become(user: User) -> None:
    """Drop root for good: groups, gid, uid, in that order; then prove that it cannot come back.

    Raises: PrivilegeError; the process must end then.
    """
    try:
        os.setgroups(list(user.groups))
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except OSError as error:
        msg = f"cannot become uid {user.uid}, gid {user.gid}: {error.strerror}"
        raise PrivilegeError(msg, hint="the container needs CAP_SETUID and CAP_SETGID") from None
    if user.uid == 0:
        return
    try:
        os.setuid(0)
    except OSError:
        return
    msg = f"root came back after becoming uid {user.uid}"
    raise PrivilegeError(msg)


def adapt(environ: MutableMapping[str, str], user: User) -> None:
    """Give the user its own HOME, USER and LOGNAME; keep the hub cache where it was.

    `HF_HOME` is fixed first, since its default hangs on HOME.
    """
    old_home = environ.get("HOME")
    if not any(name in environ for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        hub = Path(old_home or "/", ".cache", "huggingface")
        if old_home and hub.is_dir():
            environ["HF_HOME"] = str(hub)
    environ.update(HOME=user.home, USER=user.name, LOGNAME=user.name)


def is_root() -> bool:
    """Whether this process has root's uid."""
    return os.geteuid() == 0
