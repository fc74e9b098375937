"""What vLLM's environment gets of a home: only what is unset, and only where it is needed."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.privilege.home import adapt, give_up_hub, shelter
from entrypoint.privilege.user import User

ALL = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
NAMED = {"USER": "somebody"}


@pytest.fixture
def writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory that may be written: modes mean nothing to root."""
    place = tmp_path / "writable"
    place.mkdir()
    real: Callable[[str, int], bool] = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path).startswith(str(place)) and real(path, mode)
    )
    return place


def sheltered(state: Path, **environ: str) -> dict[str, str]:
    """Return what was added to the environment."""
    made = dict(environ)
    shelter(made, state)
    assert made.items() >= {k: v for k, v in environ.items() if v}.items()
    return {name: value for name, value in made.items() if environ.get(name) != value}


def test_a_home_that_can_be_written_needs_nothing(writable: Path, tmp_path: Path) -> None:
    assert sheltered(tmp_path / "state", HOME=str(writable), **NAMED) == {}
    assert sheltered(tmp_path / "state", HOME=str(writable / "not" / "yet"), **NAMED) == {}
    assert not (tmp_path / "state").exists()


def test_else_everything_is_kept_in_the_state_directory(writable: Path) -> None:
    state = writable / "state"
    added = sheltered(state, HOME="/", **NAMED)
    assert tuple(added) == ALL
    assert all(value.startswith(f"{state}/home/.cache") for value in added.values())
    assert (state / "home").stat().st_mode & 0o077 == 0
    assert sheltered(state, HOME="/", **NAMED) == added


@pytest.mark.parametrize("name", ALL)
def test_what_is_set_stays_and_an_empty_word_is_not_set(writable: Path, name: str) -> None:
    added = sheltered(writable, HOME="/", **{name: "/mine"}, **NAMED)
    assert set(added) == set(ALL) - {name}
    assert set(sheltered(writable, HOME="/", **{name: ""}, **NAMED)) == set(ALL)


def test_a_cache_directory_that_can_be_written_is_used_though_the_home_cannot(
    writable: Path, tmp_path: Path
) -> None:
    cache = writable / "cache"
    given = sheltered(writable, HOME="/", XDG_CACHE_HOME=str(cache), **NAMED)
    assert given["TRITON_CACHE_DIR"] == f"{cache}/triton"
    outer = tmp_path / "home"
    outer.mkdir()
    (outer / ".cache").symlink_to(cache)
    cache.mkdir()
    assert sheltered(writable, HOME=str(outer), **NAMED)["XDG_CACHE_HOME"].startswith(str(writable))


def test_a_cache_directory_that_cannot_be_written_is_not_used_though_the_home_can(
    writable: Path, tmp_path: Path
) -> None:
    # What is mounted at .cache/huggingface has had .cache made as root's.
    home = writable / "home"
    home.mkdir()
    (tmp_path / "mounted" / "huggingface").mkdir(parents=True)
    (home / ".cache").symlink_to("/proc/self/fdinfo/none")
    added = sheltered(writable / "state", HOME=str(home), **NAMED)
    assert added["VLLM_CACHE_ROOT"] == f"{writable}/state/home/.cache/vllm"


def test_models_that_lie_in_a_home_are_still_found_there(writable: Path, tmp_path: Path) -> None:
    hub = tmp_path / "home" / ".cache" / "huggingface"
    hub.mkdir(parents=True)
    added = sheltered(writable, HOME=str(tmp_path / "home"), **NAMED)
    assert added["HF_HOME"] == str(hub)
    assert added["VLLM_CACHE_ROOT"].startswith(str(writable))


def test_where_nothing_can_be_kept_nothing_is_set(writable: Path, tmp_path: Path) -> None:
    assert sheltered(tmp_path / "state", HOME="/", **NAMED) == {}
    (tmp_path / "file").write_text("")
    assert sheltered(tmp_path / "file", HOME="/", **NAMED) == {}


def test_a_uid_that_passwd_does_not_know_gets_a_name_and_a_home(
    writable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000660000)
    added = sheltered(writable)
    assert added["USER"] == added["LOGNAME"] == "1000660000"
    assert added["HOME"] == f"{writable}/home"
    assert added["XDG_CACHE_HOME"] == f"{writable}/home/.cache"
    assert "USER" not in sheltered(writable, LOGNAME="me")


def test_one_that_it_knows_needs_no_name(writable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = pwd.getpwuid(os.getuid())
    entry = pwd.struct_passwd((*here[:5], str(writable), here[6]))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    assert sheltered(writable) == {}


@pytest.mark.parametrize("odd", ["relative", "~", "/dev/null/x"])
def test_an_odd_home_is_one_that_cannot_be_written(writable: Path, odd: str) -> None:
    assert set(sheltered(writable, HOME=odd, **NAMED)) == set(ALL)


def test_root_hands_down_neither_its_home_nor_its_name() -> None:
    environ = {"HOME": "/nonexistent", "USER": "root", "LOGNAME": "root", "PATH": "/bin"}
    adapt(environ, User(2000, 2000, (2000,), "2000", "/"))
    assert environ == {"HOME": "/", "USER": "2000", "LOGNAME": "2000", "PATH": "/bin"}


def test_a_hub_cache_that_the_user_cannot_get_into_is_forgotten_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    kept = root / ".cache" / "huggingface"
    (kept / "hub").mkdir(parents=True)
    closed = ""
    monkeypatch.setattr(os, "access", lambda path, _: path != closed)
    user = User(2000, 2000, (2000,), "vllm", "/home/vllm")
    for closed in (str(root), str(kept), str(kept / "hub")):
        environ = {"HOME": str(root)}
        text = give_up_hub(environ, adapt(environ, user))
        assert "HF_HOME" not in environ
        assert f"may not enter {closed}," in text
        assert "mount that cache at /home/vllm/.cache/huggingface" in text
    closed = ""
    environ = {"HOME": str(root)}
    assert give_up_hub(environ, adapt(environ, user)) == ""
    assert environ["HF_HOME"] == str(kept)


def test_a_hub_cache_that_was_named_is_nobodys_but_the_users(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "HF_HOME": "/not/mine"}
    assert adapt(environ, User(2000, 2000, (2000,), "vllm", "/home/vllm")) == ""
    assert give_up_hub(environ, "") == ""
    assert environ["HF_HOME"] == "/not/mine"
