from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, outlive_ctime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoint.checkpoint import header, inspect
from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.inspect import examine, read_manifest, verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ManifestError

SHARD = "model-rank-1-part-0.safetensors"


class Checkpoint:
    def __init__(self, root: Path) -> None:
        self.manifest: Manifest = make_checkpoint(root)
        self.path = root / self.manifest.name

    def look(self, ranks: tuple[int, ...] = (0, 1)) -> tuple[str, ...]:
        return examine(self.path, self.manifest, ranks, {}).discrepancies

    def overwrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        (self.path / name).write_bytes(change((self.path / name).read_bytes()))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def test_a_whole_checkpoint_has_nothing_to_say(checkpoint: Checkpoint) -> None:
    assert checkpoint.look() == ()
    assert verify_deep(checkpoint.path, checkpoint.manifest, [0, 1]) == ()


@pytest.mark.parametrize("name", [SHARD, "config.json", "templates/chat.jinja", INDEX])
@pytest.mark.parametrize("deep", [False, True])
def test_a_missing_file_is_named(checkpoint: Checkpoint, name: str, deep: bool) -> None:
    (checkpoint.path / name).unlink()
    found = verify_deep(checkpoint.path, checkpoint.manifest, [0, 1]) if deep else checkpoint.look()
    assert found == (f"{name}: missing",)


@pytest.mark.parametrize("name", [SHARD, "config.json", "templates/chat.jinja", INDEX])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0"])
def test_another_size_is_named_with_both(
    checkpoint: Checkpoint, name: str, change: Callable[[bytes], bytes]
) -> None:
    size = (checkpoint.path / name).stat().st_size
    checkpoint.overwrite(name, change)
    now = (checkpoint.path / name).stat().st_size
    assert checkpoint.look() == (f"{name}: expected {size} bytes, found {now}",)


def test_everything_wrong_is_said_at_once(checkpoint: Checkpoint) -> None:
    (checkpoint.path / SHARD).unlink()
    (checkpoint.path / "config.json").write_text("")
    assert len(checkpoint.look()) == 2


def test_a_rank_that_is_not_here_is_not_missed(checkpoint: Checkpoint) -> None:
    (checkpoint.path / SHARD).unlink()
    assert checkpoint.look((0,)) == ()
    assert checkpoint.look((1,)) == (f"{SHARD}: missing",)


@pytest.mark.parametrize(
    "stray", ["model-rank-0-part-2.safetensors", "model-rank-7-part-0.safetensors",
              "model-pp-0-tp-0-part-0.safetensors"],
)  # fmt: skip
def test_a_stray_shard_file_is_found_before_vllm_globs_it(
    checkpoint: Checkpoint, stray: str
) -> None:
    (checkpoint.path / stray).write_bytes(b"")
    assert checkpoint.look() == (f"{stray}: a shard file that the manifest does not list",)


def test_other_strays_do_no_harm(checkpoint: Checkpoint) -> None:
    for name in ("notes.txt", ".cache", "lost+found"):
        (checkpoint.path / name).mkdir()
    assert checkpoint.look() == ()


@pytest.mark.parametrize("make", ["link", "directory", "fifo", "dangling"])
def test_what_is_no_regular_file_is_named(checkpoint: Checkpoint, make: str) -> None:
    path = checkpoint.path / SHARD
    path.rename(checkpoint.path.parent / "elsewhere")
    match make:
        case "link":
            path.symlink_to(checkpoint.path.parent / "elsewhere")
        case "dangling":
            path.symlink_to("nowhere")
        case "directory":
            path.mkdir()
        case _:
            os.mkfifo(path)
    assert checkpoint.look() == (f"{SHARD}: expected a regular file",)


def test_a_header_that_changed_within_its_size_is_found(checkpoint: Checkpoint) -> None:
    checkpoint.overwrite(SHARD, lambda data: data.replace(b"lm_head", b"lm_tail"))
    [wrong] = checkpoint.look()
    assert "lm_head.weight" in wrong
    assert "lm_tail.weight" in wrong


def test_an_index_that_changed_within_its_size_is_found(checkpoint: Checkpoint) -> None:
    checkpoint.overwrite(INDEX, lambda data: data.replace(b"lm_head", b"lm_tail"))
    [wrong] = checkpoint.look()
    assert INDEX in wrong


def test_a_truncated_header_is_said_in_words(checkpoint: Checkpoint) -> None:
    checkpoint.overwrite(SHARD, lambda data: bytes(len(data)))
    [wrong] = checkpoint.look()
    assert "zeros" in wrong


def test_a_manifest_without_an_index_is_a_discrepancy(checkpoint: Checkpoint) -> None:
    kept = tuple(entry for entry in checkpoint.manifest.files if entry.path != INDEX)
    checkpoint.manifest = checkpoint.manifest._replace(files=kept)
    assert len(checkpoint.look()) == 1


def test_a_file_where_a_directory_was_is_a_discrepancy(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "templates" / "chat.jinja").unlink()
    (checkpoint.path / "templates").rmdir()
    (checkpoint.path / "templates").write_text("")
    assert checkpoint.look() == ("templates/chat.jinja: missing",)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found_by_reading_all(
    checkpoint: Checkpoint, data: st.DataObject
) -> None:
    entry = data.draw(st.sampled_from(checkpoint.manifest.files))
    position = data.draw(st.integers(0, entry.size * 8 - 1))
    path = checkpoint.path / entry.path
    before = path.read_bytes()
    flipped = bytearray(before)
    flipped[position // 8] ^= 1 << position % 8
    path.write_bytes(flipped)
    try:
        [wrong] = verify_deep(checkpoint.path, checkpoint.manifest, [0, 1])
        assert entry.path in wrong
    finally:
        path.write_bytes(before)


def test_reading_all_says_how_far_it_is(checkpoint: Checkpoint) -> None:
    heard: list[int] = []
    verify_deep(checkpoint.path, checkpoint.manifest, [0, 1], heard.append)
    assert sum(heard) == checkpoint.manifest.size


def test_a_second_look_reads_nothing_at_all(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examine(checkpoint.path, checkpoint.manifest, [0, 1], {})
    assert first.discrepancies == ()
    opened: list[object] = []
    monkeypatch.setattr(header, "read", opened.append)
    monkeypatch.setattr(inspect, "read_bounded", lambda *words: opened.append(words))
    monkeypatch.setattr(os, "listdir", opened.append)
    second = examine(checkpoint.path, checkpoint.manifest, [0, 1], first.stamps)
    assert second == first
    assert opened == []


@pytest.mark.parametrize("name", [SHARD, "config.json", INDEX])
def test_a_file_that_was_touched_is_read_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = examine(checkpoint.path, checkpoint.manifest, [0, 1], {})
    # With its mtime put back, as rsync and cp -p do; ctime tells.
    status = (checkpoint.path / name).stat()
    outlive_ctime(checkpoint.path / name)
    checkpoint.overwrite(name, bytes)
    os.utime(checkpoint.path / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    opened: list[Path] = []
    read = header.read

    def noted(path: Path) -> dict[str, header.Slice]:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(header, "read", noted)
    assert examine(checkpoint.path, checkpoint.manifest, [0, 1], first.stamps).discrepancies == ()
    assert opened


def test_a_manifest_is_read_where_it_belongs(checkpoint: Checkpoint) -> None:
    assert read_manifest(checkpoint.path) == checkpoint.manifest
    assert digest_bytes(checkpoint.manifest.encode())


def test_a_checkpoint_that_was_renamed_is_none(checkpoint: Checkpoint) -> None:
    moved = checkpoint.path.rename(checkpoint.path.parent / "other")
    with pytest.raises(ManifestError, match="made for the name"):
        read_manifest(moved)


@pytest.mark.parametrize("make", ["link", "fifo", "directory"])
def test_a_manifest_that_is_no_regular_file_is_refused(checkpoint: Checkpoint, make: str) -> None:
    path = checkpoint.path / "manifest.json"
    path.rename(checkpoint.path.parent / "elsewhere")
    if make == "link":
        path.symlink_to(checkpoint.path.parent / "elsewhere")
    elif make == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises((ManifestError, OSError)):
        read_manifest(checkpoint.path)
