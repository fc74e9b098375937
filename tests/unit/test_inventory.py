"""Looking after a store of which not everything can be read, and that others write into."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_key
from click.testing import CliRunner, Result

from entrypoint import inventory
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.commands import group
from entrypoint.errors import DamagedError, OwnershipError, ShardbootError, StoreError, exit_code_of
from entrypoint.log import human_bytes
from entrypoint.state.rejections import Rejections
from entrypoint.store import look
from entrypoint.store.directory import DirectoryStore

Run = Callable[..., Result]
TITLE = "\x1b]0;owned\x07"
"""What sets the title of a terminal that gets to see it."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return how to run a command on the stores and the state below `tmp_path`."""
    environ = {
        "SHARDBOOT_LOCAL_DIR": str(tmp_path / "local"),
        "SHARDBOOT_STATE_DIR": str(tmp_path / "state"),
    }
    umask = os.umask(0o022)
    yield lambda *words: CliRunner().invoke(group, words, obj={"environ": environ})
    os.umask(umask)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Manifest, Manifest]:
    """Return two checkpoints of the local store."""
    one, other = (make_checkpoint(tmp_path / "local", key=make_key(tp=tp)) for tp in (1, 2))
    return one, other


@pytest.fixture
def shut(pair: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Return the first of the pair, whose manifest this user may not read any more."""
    read = DirectoryStore.read_manifest

    def refuse(store: DirectoryStore, name: str) -> bytes:
        if name == pair[0].name:
            raise StoreError(f"{name}: Permission denied")
        return read(store, name)

    monkeypatch.setattr(DirectoryStore, "read_manifest", refuse)
    return pair[0]


def error_of(result: Result) -> ShardbootError:
    assert isinstance(result.exception, ShardbootError), result.exc_info
    return result.exception


def test_a_manifest_that_cannot_be_read_hides_no_other(
    run: Run, pair: tuple[Manifest, Manifest], shut: Manifest
) -> None:
    listed = run("list")
    assert listed.exit_code == 0
    assert f"{shut.name}  unreadable: {shut.name}: Permission denied" in listed.output
    assert f"{pair[1].name}  {human_bytes(pair[1].size)}" in listed.output
    rows = {row["name"]: row for row in json.loads(run("list", "--format", "json").output)}
    assert "Permission denied" in rows[shut.name]["error"]
    assert rows[pair[1].name]["bytes"] == pair[1].size


def test_what_cannot_be_looked_at_is_unreachable_and_not_damaged(
    run: Run, pair: tuple[Manifest, Manifest], shut: Manifest
) -> None:
    done = run("verify")
    assert exit_code_of(error_of(done)) == 30
    assert f"{pair[1].name}: complete" in done.output
    assert f"{shut.name}: not looked at" in done.output
    rows = {row["name"]: row for row in json.loads(run("verify", "--format", "json").output)}
    assert rows[pair[1].name]["discrepancies"] == []
    assert "Permission denied" in rows[shut.name]["error"]


@pytest.mark.parametrize("words", [(), ("--deep",)])
def test_files_that_cannot_be_looked_at_are_unreachable_and_not_damaged(
    run: Run,
    pair: tuple[Manifest, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    def refuse(directory: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(directory))

    monkeypatch.setattr(look, "examine", refuse)
    monkeypatch.setattr(inventory, "verify_deep", refuse)
    error = error_of(run("verify", pair[0].name, *words))
    assert isinstance(error, StoreError)
    assert "Input/output error" in str(error)


def test_what_is_damaged_counts_more_than_what_could_not_be_looked_at(
    run: Run, tmp_path: Path, pair: tuple[Manifest, Manifest], shut: Manifest
) -> None:
    (tmp_path / "local" / pair[1].name / "config.json").write_text("")
    error = error_of(run("verify"))
    assert isinstance(error, DamagedError)
    assert pair[1].name in str(error)
    assert shut.name not in str(error)


def test_what_is_rejected_is_listed_as_such_until_it_is_not(
    run: Run, pair: tuple[Manifest, Manifest]
) -> None:
    def reasons() -> list[object]:
        rows = {row["name"]: row for row in json.loads(run("list", "--format", "json").output)}
        return [rows[each.name]["rejected"] for each in pair]

    assert run("reject", pair[0].name, "--reason", "slow").exit_code == 0
    (line,) = [line for line in run("list").output.splitlines() if "rejected" in line]
    assert line.startswith(pair[0].name)
    assert line.endswith("  rejected (operator: slow)")
    assert reasons() == ["operator: slow", None]
    run("unreject", pair[0].name)
    assert reasons() == [None, None]


def test_a_rejection_that_cannot_be_taken_back_is_an_error_of_ours(
    run: Run, tmp_path: Path, pair: tuple[Manifest, Manifest]
) -> None:
    state, name = tmp_path / "state", pair[0].name
    # Not even root removes this as a file.
    (state / "rejections" / f"{pair[0].content}.json").mkdir(parents=True)
    error = error_of(run("unreject", name))
    assert isinstance(error, OwnershipError)
    assert "the rejection stays" in str(error)
    assert "service user" in error.hint


def test_boots_that_failed_still_count_where_the_ledger_cannot_be_written_and_that_is_said(
    run: Run, tmp_path: Path, pair: tuple[Manifest, Manifest]
) -> None:
    state, name = tmp_path / "state", pair[0].name
    assert run("reject", name).exit_code == 0
    (state / "ledger.jsonl").mkdir()
    assert isinstance(error_of(run("unreject", name)), OwnershipError)
    # All or nothing: half of another chance would be none.
    assert Rejections(state).find(pair[0].content) is not None
    (state / "ledger.jsonl").rmdir()
    assert "may be served again" in run("unreject", name).output
    assert Rejections(state).find(pair[0].content) is None


@pytest.mark.parametrize(
    "words", [("list",), ("verify",), ("gc", "--grace", "0"), ("show", "tiny")], ids=lambda w: w[0]
)
def test_no_foreign_name_speaks_to_the_terminal_or_ends_a_line(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    local = tmp_path / "local"
    made = make_checkpoint(local, name="tiny")
    told = made._replace(source=made.source._replace(name=f"{TITLE}\nkept  tiny"))
    (local / "tiny" / MANIFEST).write_bytes(told.encode())
    planted = local / f"{TITLE}\ntiny  1 B"
    planted.mkdir()
    (planted / MANIFEST).write_text("{}")
    done = run(*words)
    assert r"\x1b]0;owned\x07\n" in done.output
    assert all(line.isprintable() for line in done.output.split("\n"))
    assert (
        sum(line.startswith(("tiny  1 B", "kept  tiny  1 B")) for line in done.output.split("\n"))
        == 0
    )


def test_of_a_checkpoint_that_holds_some_ranks_only_these_are_told_and_verified(
    run: Run, tmp_path: Path
) -> None:
    part = make_checkpoint(tmp_path / "local", tp=4, ranks=[2, 3])
    size = part.size_for([2, 3])
    assert f"{human_bytes(size)}  {part.created_at}  ranks 2-3 of 4" in run("list").output
    [row] = json.loads(run("list", "--format", "json").output)
    assert (row["bytes"], row["ranks"]) == (size, [2, 3])
    shown = run("show", part.name).output
    assert "only ranks 2-3 of 4 here" in shown
    assert "model-rank-2-part-0" in shown
    assert "model-rank-1-part-0" not in shown
    for deep in ([], ["--deep"]):
        assert f"{part.name}: complete, for ranks 2-3 of 4" in run("verify", *deep).output
    (tmp_path / "local" / part.name / "model-rank-3-part-0.safetensors").unlink()
    assert isinstance(error_of(run("verify")), DamagedError)


def test_a_local_store_that_no_boot_has_made_yet_is_an_empty_one(run: Run, tmp_path: Path) -> None:
    told = f"{tmp_path / 'local'}: not there yet, so no checkpoints\n"
    assert (run("list").output, run("verify").output) == (told, told)
    assert json.loads(run("list", "--format", "json").output) == []
    assert run("gc").output == f"{tmp_path / 'local'}: nothing to collect\n"
    error = error_of(run("show", "tiny"))
    assert (exit_code_of(error), error.hint) == (31, "it has nothing")
    assert not (tmp_path / "local").exists()


def test_a_local_store_that_is_a_link_to_nowhere_is_perhaps_not_mounted(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "local").symlink_to("nowhere")
    for words in (["list"], ["verify"], ["gc"], ["show", "tiny"]):
        assert exit_code_of(error_of(run(*words))) == 30, words
