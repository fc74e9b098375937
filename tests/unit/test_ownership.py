"""Which directories root makes ready, which it leaves alone, and what it says of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint.errors import OwnershipError
from entrypoint.privilege.ownership import check, prepare, writers
from entrypoint.privilege.user import User

SERVICE = User(2000, 3000, (3000,), "service", "/")
OTHER = 4242
MODE = 0o2750

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which it is about")


def status(mode: int, uid: int, gid: int = 0) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (status(0o755, 0), ""),
        (status(0o755, 2000), ""),
        (status(0o755, OTHER), "belongs to uid 4242"),
        (status(0o775, 0, 0), ""),
        (status(0o775, 0, 3000), ""),
        (status(0o2770, 0, OTHER), "group 4242 may write"),
        (status(0o1777, 0), "everybody may write"),
        (status(0o757, 2000, 3000), "everybody may write"),
    ],
)
def test_who_else_may_write_is_told_by_owner_group_and_mode(
    found: os.stat_result, says: str
) -> None:
    why = writers(found, SERVICE)
    assert says in why
    assert bool(why) == bool(says)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory that only root may change, all the way down."""
    before = os.umask(0o022)
    made = tmp_path / "place"
    made.mkdir()
    yield made
    os.umask(before)


def directory(path: Path, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Path:
    path.mkdir()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def facts(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def prepared(path: Path, user: User = SERVICE) -> list[str]:
    said: list[str] = []
    prepare(path, user, MODE, said.append)
    return said


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_missing_is_made_whatever_the_umask(place: Path, umask: int) -> None:
    os.umask(umask)
    assert prepared(place / "a" / "b" / "store") == []
    assert facts(place / "a" / "b" / "store") == (2000, 3000, MODE)
    assert facts(place / "a") == facts(place / "a" / "b") == (0, 0, 0o755)


@needs_root
def test_what_is_right_is_only_looked_at(place: Path) -> None:
    prepared(place / "store")
    before = (place / "store").stat().st_ctime_ns
    assert prepared(place / "store") == []
    assert (place / "store").stat().st_ctime_ns == before


@needs_root
@pytest.mark.parametrize(
    ("parent", "says"),
    [
        ((0o755, 2000, 3000), ""),
        ((0o775, 2000, 0), ""),
        ((0o1777, 0, 0), ""),
        ((0o755, OTHER, OTHER), "belongs to uid 4242"),
        ((0o777, 0, 0), "everybody may write"),
        ((0o2775, 0, OTHER), "group 4242 may write"),
    ],
)
def test_who_else_could_change_an_ancestor_is_said_and_what_root_makes_there_is_the_users(
    place: Path, parent: tuple[int, int, int], says: str
) -> None:
    mode, uid, gid = parent
    above = directory(place / "above", mode, uid, gid)
    (above / "between").mkdir()
    said = prepared(above / "between" / "store")
    assert facts(above / "between" / "store")[0] == 2000
    assert [f"{above}: " in text and says in text for text in said] == [True] * bool(says)
    assert facts(above) == (uid, gid, mode)


@needs_root
@pytest.mark.parametrize("above", [(0o777, 0), (0o1777, 0), (0o755, OTHER), (0o755, 2000)])
def test_what_somebody_made_where_others_may_is_never_given_away(
    place: Path, above: tuple[int, int]
) -> None:
    mode, uid = above
    shared = directory(place / "shared", mode, uid)
    planted = directory(shared / "store", 0o777, OTHER)
    said = prepared(planted)
    if uid == 2000:
        # Nobody but root and the user could have put it there.
        assert facts(planted)[0] == 2000
    else:
        assert facts(planted) == (OTHER, 0, 0o777)
        assert f"{planted}: root touches nothing there: uid 4242 has made it" in said


@needs_root
def test_an_empty_volume_is_given_whoever_it_belonged_to_and_not_everybody_may_write_then(
    place: Path,
) -> None:
    volume = directory(place / "store", 0o777, OTHER, OTHER)
    (volume / "lost+found").mkdir()
    assert prepared(volume) == []
    assert facts(volume) == (2000, 3000, 0o775)


@needs_root
@pytest.mark.parametrize("owner", [0, OTHER])
def test_what_is_not_empty_stays_whose_it_is_and_what_mends_it_is_said(
    place: Path, owner: int
) -> None:
    store = directory(place / "store", 0o755, owner)
    make_checkpoint(store)
    (said,) = prepared(store)
    assert f"{store}: stays with uid {owner}, since it is not empty" in said
    assert "chown it once" in said
    assert facts(store) == (owner, 0, 0o755)


@needs_root
def test_a_setgid_directory_keeps_its_group_and_what_is_made_in_one_gets_it(place: Path) -> None:
    above = directory(place / "above", 0o2775, 0, 3000)
    alone = User(2000, 2000, (2000,), "2000", "/")
    prepared(above / "store", alone)
    assert facts(above / "store") == (2000, 3000, MODE)
    volume = directory(place / "volume", 0o2770, 0, 3000)
    prepared(volume, alone)
    assert facts(volume)[:2] == (2000, 3000)


@needs_root
def test_a_store_of_the_users_in_which_everybody_may_write_is_said_and_left(place: Path) -> None:
    store = directory(place / "store", 0o777, 2000, 3000)
    (said,) = prepared(store)
    assert f"{store}: others could exchange what lies there: everybody may write" in said
    assert facts(store) == (2000, 3000, 0o777)


@needs_root
def test_a_link_of_roots_is_followed_and_one_that_others_may_have_put_there_is_not(
    place: Path,
) -> None:
    precious = directory(place / "precious")
    (place / "ours").symlink_to("precious")
    assert prepared(place / "ours" / "store") == []
    assert facts(precious / "store")[0] == 2000
    for number, owner in enumerate((2000, OTHER)):
        theirs = directory(place / f"theirs{number}", 0o755, owner)
        (theirs / "link").symlink_to(precious)
        said = prepared(theirs / "link" / "other")
        assert f"{theirs / 'link'}: a link" in said[-1]
    assert os.listdir(precious) == ["store"]


@needs_root
@pytest.mark.parametrize("kind", ["link", "file", "loop", "under a file"])
def test_what_can_be_no_directory_is_exit_60(place: Path, kind: str) -> None:
    path = place / "store"
    match kind:
        case "link":
            path.symlink_to(directory(place / "precious"))
        case "loop":
            (place / "loop").symlink_to("loop")
            path = place / "loop" / "store"
        case _:
            path.write_text("")
            path = path if kind == "file" else path / "store"
    with pytest.raises(OwnershipError, match=str(path)):
        prepared(path)
    assert not (place / "precious").exists() or facts(place / "precious")[0] == 0


@needs_root
@pytest.mark.parametrize("with_what", ["link", "their own", "roots"])
@pytest.mark.parametrize("below", ["", "below"])
def test_what_is_exchanged_between_making_and_opening_gets_nobody_anything(
    place: Path, monkeypatch: pytest.MonkeyPatch, with_what: str, below: str
) -> None:
    theirs = directory(place / "theirs", 0o755, OTHER)
    precious = directory(place / "precious", 0o700)
    (precious / "secret").write_text("x")
    mkdir: Callable[..., None] = os.mkdir

    def make_and_exchange(name: str, *words: int, dir_fd: int) -> None:
        mkdir(name, *words, dir_fd=dir_fd)
        if name != "store":
            return
        os.rmdir(theirs / "store")
        match with_what:
            case "link":
                (theirs / "store").symlink_to(precious)
            case "their own":
                mkdir(theirs / "store")
                os.chown(theirs / "store", OTHER, OTHER)
            case _:
                precious.rename(theirs / "store")

    monkeypatch.setattr(os, "mkdir", make_and_exchange)
    try:
        said = prepared(theirs / "store" / below)
        assert ("exchanged when" in said[-1]) == (with_what == "roots")
    except OwnershipError:
        assert with_what == "link"
    if with_what == "their own":
        assert facts(theirs / "store") == (OTHER, OTHER, 0o755)
    held = theirs / "store" if with_what == "roots" else precious
    assert facts(held) == (0, 0, 0o700)
    assert os.listdir(held) == ["secret"]


def checked(path: Path) -> list[str]:
    said: list[str] = []
    check(path, said.append)
    return said


@needs_root
def test_root_that_stays_root_hears_who_decides_what_it_serves(place: Path) -> None:
    assert checked(place / "missing" / "store") == []
    store = directory(place / "store")
    assert checked(store) == []
    store.chmod(0o1777)
    os.chown(place, OTHER, OTHER)
    owner, everybody = checked(store)
    assert owner.startswith(f"{place}: others could exchange")
    assert owner.endswith("it belongs to uid 4242")
    assert f"{store}: others could exchange what lies there: everybody may" in everybody


@needs_root
@pytest.mark.parametrize(
    "name",
    [
        *(".trash", ".staging", "status", "memory", "memory/engines", "memory/prefetched"),
        *("caches", "caches/.trash", "imports", "awaited"),
    ],
)
def test_root_that_stays_root_works_beside_no_planted_link(place: Path, name: str) -> None:
    store = directory(place / "store", 0o755, OTHER)
    (store / name).parent.mkdir(exist_ok=True)
    (store / name).symlink_to("/etc")
    with pytest.raises(OwnershipError, match=f"{store}/{name}: .*a link"):
        checked(store)


@needs_root
def test_a_file_in_the_way_is_no_link(place: Path) -> None:
    store = directory(place / "store")
    (store / "memory").write_text("")
    assert checked(store) == []


@needs_root
def test_root_that_stays_root_follows_its_own_links_alone(place: Path) -> None:
    store = directory(place / "store")
    (place / "ours").symlink_to(store)
    assert checked(place / "ours") == []
    theirs = directory(place / "theirs", 0o755, OTHER)
    (theirs / "store").symlink_to(store)
    with pytest.raises(OwnershipError, match=f"{theirs / 'store'}: a link"):
        checked(theirs / "store")
