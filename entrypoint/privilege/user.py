"""Who vLLM runs as: read as chown and docker read a user, and become."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
import pwd
from collections.abc import Iterable
from typing import NamedTuple

from entrypoint.errors import PrivilegeError


class User(NamedTuple):
    """Who vLLM will run as: ids, supplementary groups, and the names that its environment gets."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str


ROOT = User(0, 0, (0,), "root", "/root")


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
    import grp  # noqa: PLC0415 - numbers need it not

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        msg = f"--user {word}: there is no group {group!r} here"
        raise PrivilegeError(msg, hint="name a group of this system, or give its number") from None


def require_mapped(user: User) -> None:
    """Refuse a user whom this user namespace does not have, before anything is made for it.

    Raises: PrivilegeError.
    """
    for table, what, ids in (("uid_map", "uid", (user.uid,)), ("gid_map", "gid", user.groups)):
        path = f"/proc/self/{table}"
        try:
            with open(path, "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            # The kernel will tell.
            return
        for number in unmapped(lines, ids):
            msg = f"cannot become {what} {number}: this user namespace maps no such id ({path})"
            hint = "give the container more ids (podman --uidmap, --gidmap), or another --user"
            raise PrivilegeError(msg, hint=hint)


def unmapped(lines: Iterable[bytes], ids: Iterable[int]) -> list[int]:
    """Return those of `ids` that the lines of a uid_map do not cover (user_namespaces(7))."""
    ranges = [(int(first), int(count)) for first, _, count in map(bytes.split, lines)]
    return [n for n in ids if not any(first <= n < first + count for first, count in ranges)]


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
