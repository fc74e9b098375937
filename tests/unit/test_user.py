"""Who a user is, and whether this user namespace has one."""

from __future__ import annotations

import os

import pytest

from entrypoint.errors import PrivilegeError
from entrypoint.privilege import user
from entrypoint.privilege.stepping_down import become_user
from entrypoint.privilege.user import resolve_user, unmapped

ALL = [b"         0          0 4294967295"]
ROOTLESS = [b"         0       1000          1", b"         1     100000      65536"]


@pytest.mark.parametrize(
    ("lines", "ids", "missing"),
    [
        (ALL, (0, 2000, 4294967294), []),
        (ROOTLESS, (0, 1, 65536), []),
        (ROOTLESS, (65537, 2000, 70000), [65537, 70000]),
        ([b"0 100000 1000"], (999, 1000), [1000]),
        ([], (0,), [0]),
    ],
)
def test_an_id_is_there_if_a_line_of_the_map_covers_it(
    lines: list[bytes], ids: tuple[int, ...], missing: list[int]
) -> None:
    assert unmapped(lines, ids) == missing


def test_one_that_is_not_there_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    became: list[object] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(user, "unmapped", lambda _, ids: list(ids))
    monkeypatch.setattr(user, "become", became.append)
    environ = {"HOME": "/root"}
    with pytest.raises(PrivilegeError, match=r"cannot become uid 2000: .* maps no such id"):
        become_user("2000", environ)
    assert (became, environ) == ([], {"HOME": "/root"})


def test_a_number_needs_no_entry_anywhere() -> None:
    user = resolve_user("1000660000:0")
    assert (user.uid, user.gid, user.groups) == (1000660000, 0, (0,))
    assert (user.name, user.home) == ("1000660000", "/")
