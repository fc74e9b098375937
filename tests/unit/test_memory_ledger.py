from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.child import MAX_LOGS, open_log
from entrypoint.state import files
from entrypoint.state import ledger as ledgers
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import MAX_ENTRIES, Memory


def test_an_answer_is_remembered_by_its_subject_and_question(tmp_path: Path) -> None:
    mind = Memory(tmp_path / "state")
    assert mind.recall("engines", "q") is None
    assert mind.remember("engines", "q", {"a": [1, None]})
    assert mind.recall("engines", "q") == {"a": [1, None]}
    assert mind.recall("resolutions", "q") is None
    assert Memory(tmp_path / "state").recall("engines", "q") == {"a": [1, None]}


def test_all_answers_of_a_kind_are_forgotten_at_once(tmp_path: Path) -> None:
    mind = Memory(tmp_path)
    for question in ("p", "q"):
        mind.remember("resolutions", question, 1)
        mind.remember("engines", question, 1)
    mind.forget("resolutions")
    mind.forget("resolutions")
    assert [mind.recall("resolutions", q) for q in ("p", "q")] == [None, None]
    assert [mind.recall("engines", q) for q in ("p", "q")] == [1, 1]


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    mind = Memory(tmp_path)
    mind.remember("engines", "q", {"a": 1})
    [path] = (tmp_path / "memory" / "engines").iterdir()
    before = path.stat()
    assert mind.remember("engines", "q", {"a": 1})
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert mind.remember("engines", "q", {"a": 2})
    assert path.stat().st_ino != before.st_ino


def test_memory_is_bounded_and_forgets_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "fsync_directory", lambda path: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    mind = Memory(tmp_path)
    for number in range(MAX_ENTRIES + 5):
        mind.remember("engines", f"q{number}", number)
        path = tmp_path / "memory" / "engines" / f"q{number}.json"
        os.utime(path, ns=(number, number))
    assert [n for n in range(MAX_ENTRIES + 5) if mind.recall("engines", f"q{n}") is None] == [
        *range(5)
    ]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 50_000, b"NaNx"])
def test_what_cannot_be_read_is_as_good_as_forgotten(tmp_path: Path, data: bytes) -> None:
    mind = Memory(tmp_path)
    mind.remember("engines", "q", 1)
    [path] = (tmp_path / "memory" / "engines").iterdir()
    path.write_bytes(data)
    assert mind.recall("engines", "q") is None
    assert mind.remember("engines", "q", 2)
    assert mind.recall("engines", "q") == 2


def test_a_memory_that_is_a_link_or_a_fifo_is_not_followed(tmp_path: Path) -> None:
    mind = Memory(tmp_path)
    mind.remember("engines", "q", 1)
    [path] = (tmp_path / "memory" / "engines").iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert mind.recall("engines", "q") is None
    path.unlink()
    os.mkfifo(path)
    assert mind.recall("engines", "q") is None


def test_without_a_writable_directory_it_says_so_and_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not Memory(blocked).remember("engines", "q", 1)
    assert Memory(blocked).recall("engines", "q") is None
    assert not Ledger(blocked).append({"a": 1})
    assert list(Ledger(blocked).entries()) == []
    assert Ledger(blocked).recent_about("a") == []


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_answer_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    mind = Memory(tmp_path)
    mind.remember("engines", "q", 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if at == "fsync" else Path, at, fail)
    assert not mind.remember("engines", "q", 2)
    monkeypatch.undo()
    assert mind.recall("engines", "q") == 1
    assert [p.name for p in (tmp_path / "memory" / "engines").iterdir()] == ["q.json"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_state_file_has_its_mode_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files.write_atomically(tmp_path / "x", b"data")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_the_ledger_gives_its_lines_back_oldest_first(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "state")
    entries: list[dict[str, Json]] = [{"n": n, "text": "a\nb"} for n in range(5)]
    assert all(book.append(entry) for entry in entries)
    assert list(book.entries()) == entries
    assert book.recent_about("text") == entries


@pytest.mark.parametrize("torn", [b'{"n": 9, "x', b'{"n": 9}', b"\xff\xfe", b"[" * 9999])
def test_a_torn_end_costs_one_line_at_most(tmp_path: Path, torn: bytes) -> None:
    book = Ledger(tmp_path)
    book.append({"n": 1})
    with book.path.open("ab") as file:
        file.write(torn)
    book.append({"n": 2})
    numbers = [entry["n"] for entry in book.entries() if entry["n"] != 9]
    assert numbers == [1, 2]


def test_the_ledger_is_bounded_and_keeps_one_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "MAX_LEDGER_BYTES", 1000)
    book = Ledger(tmp_path)
    for number in range(200):
        assert book.append({"n": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.1.jsonl", "ledger.jsonl"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3000
    numbers = [entry["n"] for entry in book.entries()]
    assert numbers == list(range(200))[-len(numbers) :]


def test_the_latest_lines_are_there_after_a_new_file_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "MAX_LEDGER_BYTES", 0)
    book = Ledger(tmp_path)
    entries: list[dict[str, Json]] = [{"boot": "b1", "event": e} for e in ("loading", "loaded")]
    for entry in entries:
        assert book.append(entry)
    assert not book.path.exists()
    assert book.recent_about("b1") == book.recent_of("b1") == entries
    book.append({"boot": "b2"})
    assert book.recent_about('"boot"') == [*entries, {"boot": "b2"}]


def test_of_two_that_begin_a_new_file_at_once_neither_loses_the_older_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, write = Ledger(tmp_path), os.write
    book.append({"n": 0})
    monkeypatch.setattr(ledgers, "MAX_LEDGER_BYTES", 7)

    def write_and_be_overtaken(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data)
        monkeypatch.setattr(os, "write", write)
        for number in (2, 3):
            book.append({"n": number})
        return written

    monkeypatch.setattr(os, "write", write_and_be_overtaken)
    assert book.append({"n": 1})
    assert [entry["n"] for entry in book.entries()] == [0, 1, 2, 3]


def boot_lines(of: str, count: int) -> list[dict[str, Json]]:
    """Return what so many boots leave: an attempt as long as one with its phases, and two notes."""
    lines: list[dict[str, Json]] = []
    for n in range(count):
        boot: dict[str, Json] = {"boot": f"{of}-{n}"}
        phases: list[Json] = [{"phase": "x" * 1000}]
        lines.append(boot | {"event": "attempt", "manifest": of, "phases": phases})
        lines += [boot | {"event": event} for event in ("loading", "loaded")]
    return lines


def test_boots_of_one_checkpoint_are_found_behind_many_of_others(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    mine = boot_lines("mine", 3)
    for entry in (*mine, *boot_lines("other", 300)):
        book.append(entry)
    book.append({"event": "unrejected", "manifest": "mine"})
    book.append({"event": "no boot's"})
    assert book.recent_about("mine") == [*mine, {"event": "unrejected", "manifest": "mine"}]


def test_of_one_checkpoint_no_more_boots_are_read_than_are_enough(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    mine = boot_lines("mine", 3 * ledgers.ENOUGH)
    for entry in mine:
        book.append(entry)
    found = book.recent_about('"manifest":"mine"')
    assert found == mine[-3 * ledgers.ENOUGH :]


def test_a_look_at_one_boot_passes_over_all_others(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    mine: list[dict[str, Json]] = [
        {"boot": "b1", "event": event} for event in ("loading", "loaded")
    ]
    others: list[dict[str, Json]] = [{"boot": "b10"}, {"event": "b1"}, {"boot": "b2"}]
    for entry in (mine[0], *others, mine[1]):
        book.append(entry)
    with book.path.open("ab") as file:
        file.write(b'{"boot": "b1", "ev')
    assert book.recent_of("b1") == mine
    assert book.recent_of("b3") == []
    assert Ledger(tmp_path / "none").recent_of("b1") == []


def test_a_look_at_a_boot_that_left_nothing_holds_next_to_nothing(tmp_path: Path) -> None:
    book = Ledger(tmp_path)
    for entry in boot_lines("other", 600):
        book.append(entry)
    assert book.path.stat().st_size > ledgers.SEARCHED_BYTES
    tracemalloc.start()
    try:
        assert book.recent_of("b1") == []
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < ledgers.RECENT_BYTES


def test_lines_of_many_writers_never_mix(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from entrypoint.state.ledger import Ledger;"
        "[Ledger(Path(sys.argv[1])).append({'w': sys.argv[2], 'n': n, 'x': 'y' * 300})"
        " for n in range(100)]"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(w)]) for w in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert sum(1 for _ in Ledger(tmp_path).entries()) == 400


def test_a_ledger_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "victim")
    assert not Ledger(tmp_path).append({"a": 1})
    assert not (tmp_path / "victim").exists()


def test_a_log_is_its_users_alone_and_a_file_of_its_own(tmp_path: Path) -> None:
    another = tmp_path / "another"
    another.write_text("of before")
    another.chmod(0o644)
    (tmp_path / "save.log").hardlink_to(another)
    for _ in range(2):
        with open_log(tmp_path / "save.log") as log:
            log.write(b"said")
        assert (tmp_path / "save.log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "save.log").read_text() == "said"
    assert another.read_text() == "of before"


def test_of_many_logs_the_newest_stay(tmp_path: Path) -> None:
    for number in range(30):
        with open_log(tmp_path / f"save-{number}.log") as log:
            log.write(b"said")
        os.utime(tmp_path / f"save-{number}.log", (number, number))
    with open_log(tmp_path / "last.log"):
        pass
    kept = {f"save-{number}.log" for number in range(30 - MAX_LOGS + 1, 30)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"last.log"}


FULL = """
import resource, sys
from pathlib import Path
from entrypoint.state.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
assert ledger.append({"boot": "a"})
size = ledger.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, resource.RLIM_INFINITY))
print(ledger.append({"boot": "b"}), ledger.path.stat().st_size - size)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert ledger.append({"boot": "c"})
print(*(entry["boot"] for entry in ledger.entries()))
"""


def test_a_line_of_which_a_full_disk_took_a_part_is_not_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False 5", "a c"]
