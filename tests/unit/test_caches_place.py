"""Where vLLM's caches of a checkpoint are kept, and when nothing is chosen."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from entrypoint.caches import place
from entrypoint.caches.heal import heal, renew, sole

PATH = "/store/name"
NAME = "model-tp2-bf16-vllm0.32.0-0123456789ab"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def where(state: Path) -> Path:
    return place.place_of(state, NAME)


def filled(where: Path, **files: str) -> Path:
    where.mkdir(place.MODE, parents=True, exist_ok=True)
    for path, text in files.items():
        file = where / "vllm" / path.replace("__", "/").replace("_so", ".so")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return where


def test_a_checkpoint_has_one_place_on_a_platform_and_another_on_another(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place.place_of(state, NAME)
    assert here.parent == state / "caches"
    assert place.place_of(state, NAME) == here
    assert place.checkpoint_of(here.name) == NAME
    monkeypatch.setattr(place, "machine", lambda: ["x86_64", "flags without avx512"])
    assert place.place_of(state, NAME) != here
    assert not here.exists()


def test_vllm_gets_all_its_places_in_it(state: Path, where: Path) -> None:
    given = place.give({"PATH": "/bin"}, state, where, PATH)
    assert given == {
        "PATH": "/bin",
        "VLLM_CACHE_ROOT": f"{where}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{where}/inductor",
        "TRITON_CACHE_DIR": f"{where}/triton",
    }
    assert where.stat().st_mode & 0o077 == 0
    assert place.give({"PATH": "/bin"}, state, where, PATH) == given


def test_a_checkpoint_may_lie_at_a_path_that_is_no_utf_8(state: Path, where: Path) -> None:
    given = place.give({}, state, where, os.fsdecode(b"/store/\xff/name"))
    assert given["VLLM_CACHE_ROOT"] == f"{where}/vllm"
    assert (where / place.CHECKPOINT).read_bytes() == b"/store/\xff/name"


def test_a_users_own_choice_stays(state: Path, where: Path) -> None:
    assert not place.is_asked_for({"VLLM_CACHE_ROOT": "/mine"}, state)
    given = place.give({"TRITON_CACHE_DIR": "/mine"}, state, where, PATH)
    assert given["TRITON_CACHE_DIR"] == "/mine"
    assert given["VLLM_CACHE_ROOT"] == f"{where}/vllm"


def test_what_stands_in_for_a_home_is_no_choice_of_the_users(state: Path, where: Path) -> None:
    sheltered = {"VLLM_CACHE_ROOT": f"{state}/home/.cache/vllm"}
    assert place.is_asked_for(sheltered, state)
    assert place.is_asked_for({"VLLM_CACHE_ROOT": ""}, state)
    assert place.give(sheltered, state, where, PATH)["VLLM_CACHE_ROOT"] == f"{where}/vllm"


def test_where_it_cannot_be_made_nothing_is_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"PATH": "/bin"}
    where = place.place_of(tmp_path / "file", NAME)
    assert place.give(environ, tmp_path / "file", where, PATH) == environ


def test_a_place_in_which_others_could_put_code_is_not_used(state: Path, where: Path) -> None:
    place.give({}, state, where, PATH)
    where.chmod(0o770)
    assert place.give({}, state, where, PATH) == {}
    where.chmod(0o700)
    os.rename(where, state / "elsewhere")
    where.symlink_to(state / "elsewhere")
    assert place.give({}, state, where, PATH) == {}


def test_while_vllm_runs_nobody_takes_its_caches_away(state: Path, where: Path) -> None:
    program = (
        "import pathlib, subprocess, sys; from entrypoint.caches import place;"
        "place.give({}, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), '/store/name');"
        "import os; os.execv('/bin/cat', ['cat'])"
    )
    command = [sys.executable, "-c", program, str(state), str(where)]
    vllm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert vllm.stdin is not None
    assert vllm.stdout is not None
    vllm.stdin.write(b"running\n")
    vllm.stdin.flush()
    assert vllm.stdout.readline() == b"running\n"
    with sole(where) as obstacle:
        assert isinstance(obstacle, BlockingIOError)
    assert not renew(where)
    filled(where, being_written="")
    assert heal(where) == 0
    vllm.communicate()
    assert heal(where) == 1
    assert renew(where)
    assert not where.exists()
    assert os.listdir(where.parent / ".trash") == []


def test_what_a_crash_has_left_empty_goes_and_nothing_else(where: Path) -> None:
    filled(where, a__kernel_so="", b__model="graph", b__rank__model="")
    (where / "vllm" / "locks").mkdir()
    (where / "vllm" / "locks" / "kernel.lock").touch()
    (where / "vllm" / "dangling").symlink_to("nowhere")
    assert heal(where) == 2
    left = {str(path.relative_to(where)) for path in where.rglob("*") if not path.is_dir()}
    assert left == {"vllm/b/model", "vllm/locks/kernel.lock", "vllm/dangling"}
    assert heal(where) == 0


def test_what_cannot_be_read_goes(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(where, torn="graph", whole="graph")
    real = os.open

    def failing(path: str, *words: Any, **named: Any) -> int:
        if path == "torn":
            raise OSError(5, "Input/output error")
        return real(path, *words, **named)

    monkeypatch.setattr(os, "open", failing)
    assert heal(where) == 1
    assert os.listdir(where / "vllm") == ["whole"]


def test_nothing_of_another_users_goes(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(where, torn="")
    where.chmod(0o770)
    assert (heal(where), renew(where)) == (0, False)
    where.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: where.stat().st_uid + 1)
    assert (heal(where), renew(where)) == (0, False)
    monkeypatch.undo()
    assert (heal(where), renew(where)) == (1, True)


def test_nothing_goes_through_a_link_that_somebody_has_just_put_there(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(where, torn="")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "torn").touch()

    def bad(*_: object) -> bool:
        (where / "vllm").rename(where / "moved")
        (where / "vllm").symlink_to(tmp_path / "elsewhere")
        return True

    monkeypatch.setattr("entrypoint.caches.heal._is_bad", bad)
    assert heal(where) == 1
    assert (tmp_path / "elsewhere" / "torn").exists()


def test_no_more_is_looked_at_than_a_boot_can_wait_for(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(where, **{f"f{number}": "" for number in range(5)})
    monkeypatch.setattr("entrypoint.caches.heal.MOST_ENTRIES", 3)
    assert heal(where) == 3


def test_caches_that_are_not_there_need_nothing(where: Path) -> None:
    assert heal(where) == 0
    assert not renew(where)


@pytest.fixture
def looking(where: Path) -> int:
    """Hold the lock as whoever looks whether caches are in use does; return its descriptor."""
    descriptor = os.open(filled(where, graph="graph"), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_boot_in_the_instant_of_a_look_holds_its_caches_all_the_same(
    state: Path, where: Path, looking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    assert place.give({}, state, where, PATH) != {}
    os.close(looking)
    with sole(where) as obstacle:
        assert isinstance(obstacle, BlockingIOError)


def test_caches_that_were_taken_away_in_that_instant_are_not_given(
    state: Path, where: Path, looking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(_: float) -> None:
        where.rename(state / "taken")
        where.mkdir()
        os.close(looking)

    monkeypatch.setattr(time, "sleep", take)
    assert place.give({}, state, where, PATH) == {}


def test_no_boot_waits_for_ever_for_its_caches(
    state: Path, where: Path, looking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_LOCK_SECONDS", 0)
    assert place.give({}, state, where, PATH) == {}
    os.close(looking)


def test_where_there_are_no_locks_caches_are_kept_all_the_same(
    state: Path, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    assert place.give({}, state, where, PATH) != {}


def test_new_caches_begin_with_what_vllm_knows_of_models(state: Path, where: Path) -> None:
    usual = state / "home" / ".cache" / "vllm"
    (usual / "modelinfos").mkdir(parents=True)
    (usual / "modelinfos" / "llama.json").write_text("{}")
    (usual / "torch_compile_cache").mkdir()
    place.give({"HOME": str(state / "home")}, state, where, PATH)
    assert os.listdir(where / "vllm") == ["modelinfos"]
    assert (where / "vllm" / "modelinfos" / "llama.json").read_text() == "{}"
    (usual / "modelinfos" / "llama.json").write_text("newer")
    place.give({"HOME": str(state / "home")}, state, where, PATH)
    assert (where / "vllm" / "modelinfos" / "llama.json").read_text() == "{}"
