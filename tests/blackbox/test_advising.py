"""`shardboot advise` as a command: from what boots have left, and without a boot."""

from __future__ import annotations

from typing import Any

import pytest
from blackbox.harness import Boot, House

from entrypoint.state.ledger import Ledger


def note(house: House, boot: Boot, event: str, seconds: float) -> None:
    """Leave what vLLM's loaders leave, which the stub has none of."""
    line: dict[str, Any] = {"boot": boot.loader["boot"], "event": event, "seconds": seconds}
    assert Ledger(house.state).append(line)


def test_boots_tell_when_a_checkpoint_pays(house: House) -> None:
    first, second = house.serve(), house.serve()
    note(house, first, "source-loaded", 1000.0)
    for boot in (first, second):
        note(house, boot, "loaded", 400.0)
    [found] = house.run("advise", "--format", "json").json
    assert found["name"] == "model-tp2-bf16"
    assert (found["boots"], found["boots_by_release"]) == (2, [2])
    assert (found["source_seconds"], found["load_seconds"]) == (1000.0, 400.0)
    # The stub's save takes no time.
    assert (found["step"], found["verdict"], found["pays_from_boot"]) == ("save", "pays", 1)
    lines = house.run("advise").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "model-tp2-bf16"]
    assert lines[1].endswith("pays from boot 1")


def test_a_copy_is_timed_as_well(house: House) -> None:
    house.serve()
    house.shared_copy()
    (house.state / "ledger.jsonl").unlink()
    assert house.run("pull", "--shared", house.shared, house.model, "-tp", 2).status == 0
    [found] = house.run("advise", "--format", "json").json
    assert found["step"] == "copy"
    assert 0 < found["step_seconds"] < 60
    assert found["verdict"] == "unknown"


def test_with_a_model_only_that_one_is_told_of(house: House) -> None:
    house.serve()
    [found] = house.run("advise", "--format", "json", house.model, "-tp", 2).json
    assert (found["name"], found["boots"]) == ("model-tp2-bf16", 1)
    [found] = house.run("advise", "--format", "json", house.model, "-tp", 4).json
    assert (found["name"], found["boots"], found["step"]) == ("model-tp4-bf16", 0, None)
    assert "shardboot save" in found["text"]


def test_without_a_boot_there_is_nothing_to_tell(house: House) -> None:
    boot = house.run("advise")
    assert (boot.status, boot.stderr) == (0, "")
    assert boot.stdout == f"no boot is known here: {house.state}/ledger.jsonl\n"
    assert not house.local.exists()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("--source-rate", "fast"), 2, "expected a size"),
        (("--source-rate", "0"), 2, "more than nothing"),
        (("model", "--no-such-word"), 2, "unrecognized arguments"),
    ],
)
def test_what_it_cannot_take_is_said(
    house: House, words: tuple[str, ...], status: int, says: str
) -> None:
    boot = house.run("advise", *words)
    assert (boot.status, says in boot.stderr) == (status, True), boot.stderr
