"""`shardboot tune` as a command: what it says, what it writes, and that nothing stays."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest
from blackbox.harness import House, is_gone, staged

SIZES = ("--sizes", "1MiB,2MiB,4MiB")
TIMES = [3.0, 2.0, 1.95]


@pytest.fixture
def settings(house: House) -> Path:
    path = house.root / "shardboot.toml"
    path.write_text("# ours\n")
    house.environ["SHARDBOOT_CONFIG_FILE"] = str(path)
    house.rules(tune={"seconds": TIMES})
    return path


def test_the_smallest_size_that_loads_as_fast_is_found_and_nothing_stays(
    house: House, settings: Path
) -> None:
    boot = house.run("tune", "--format", "json", *SIZES, "--runs", 2, house.model, "-tp", 2)
    found = boot.json
    assert [each["size_per_file"] for each in found["sizes"]] == ["1MiB", "2MiB", "4MiB"]
    assert [each["cold_seconds"] for each in found["sizes"]] == [[t, t] for t in TIMES]
    assert (found["size_per_file"], found["in_force"]) == ("2MiB", "4GiB")
    assert found["written"] is None
    assert settings.read_text() == "# ours\n"
    assert house.calls == ["resolve", "tune"]
    assert house.store.names() == []
    assert not [*staged(house.local)]


def test_how_much_room_it_takes_is_said_before_and_every_load_as_it_is_done(
    house: House, settings: Path
) -> None:
    boot = house.run("tune", *SIZES, "--runs", 1, house.model, "-tp", 2)
    assert boot.status == 0, boot.stderr
    assert boot.events[-11:] == ["tune.space", "tune.start"] + ["tune.progress"] * 9
    assert (
        f"3 times 1.2 kB, as the source has, at most, for a while, in {house.local}" in boot.stderr
    )
    assert "2MiB a file: load 3, cold, 2.00 s" in boot.stderr
    lines = boot.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["size", "1MiB", "2MiB", "4MiB", "2MiB", "now"]
    assert lines[-1].startswith("now it is 4GiB; --write puts")


def test_the_setting_is_written_where_boots_read_it(house: House, settings: Path) -> None:
    words = ("tune", *SIZES, "--runs", 1, "--write", "--plot", "p.svg", house.model, "-tp", 2)
    boot = house.run(*words)
    assert boot.status == 0, boot.stderr
    assert boot.stdout.splitlines()[-1].endswith('size-per-file = "2MiB"; the next save goes by it')
    assert settings.read_text() == '# ours\nsize-per-file = "2MiB"\n'
    assert tomllib.loads(settings.read_text()) == {"size-per-file": "2MiB"}
    assert (house.root / "p.svg").read_text().startswith("<svg")
    again = house.run(*words, SHARDBOOT_SIZE_PER_FILE="8GiB")
    assert again.stdout.splitlines()[-1].endswith("SHARDBOOT_SIZE_PER_FILE is set, and wins")


@pytest.mark.parametrize(
    ("words", "rules", "status", "says"),
    [
        (("--sizes", "1GiB,big"), {}, 2, "expected a size"),
        (("--sizes", "0"), {}, 2, "at least one byte"),
        (("--runs", "0"), {}, 2, "1<=x<=50"),
        (("--plot", "p.jpg"), {}, 2, "expected FILE.svg"),
        (("--reserve-bytes", "900TB"), {}, 42, "kept in reserve"),
        ((), {"refuse": ["save.online-quant", "no state"]}, 50, "save.online-quant: no state"),
        ((), {"exit": 3}, 50, "ended with status 3"),
        (("--save-timeout", "0.2s"), {"hang": True}, 50, "fewer --sizes or --runs"),
    ],
)
def test_what_keeps_it_from_measuring_is_said(
    house: House, words: tuple[str, ...], rules: dict[str, object], status: int, says: str
) -> None:
    house.rules(tune=rules)
    boot = house.run("tune", *SIZES, *words, house.model, "-tp", 2)
    assert (boot.status, says in boot.stderr) == (status, True), boot.stderr
    assert not [*staged(house.local)]


def test_a_stop_ends_the_child_and_leaves_nothing(house: House, settings: Path) -> None:
    house.rules(tune={"hang": True})
    process = house.start("tune", *SIZES, house.model, "-tp", 2)
    house.wait_for("hanging")
    process.send_signal(signal.SIGTERM)
    assert house.finish(process).status == 128 + signal.SIGTERM
    pids = [int(pid) for pid in (house.root / "hanging").read_text().split()]
    assert all(is_gone(pid) for pid in pids)
    assert not [*staged(house.local)]
