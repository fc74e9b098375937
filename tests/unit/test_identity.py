from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, outlive_ctime

from entrypoint.checkpoint import header
from entrypoint.checkpoint.digest import digest_file
from entrypoint.errors import StoreError
from entrypoint.model import identity as identities
from entrypoint.model import lookalike
from entrypoint.model.identity import (
    Identity,
    last_remembered,
    learn,
    read_in_full,
    remember_word,
    remembered,
)
from entrypoint.model.lookalike import sample
from entrypoint.model.survey import Survey, look
from entrypoint.state.memory import Memory

SIZE = 4096
SHAPES = [("a", "I8", (SIZE,), SIZE), ("b", "I8", (SIZE,), SIZE)]


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "tokenizer.json").write_text("{}")
    head, _ = header.encode(SHAPES)
    (directory / "model.safetensors").write_bytes(head + bytes(range(256)) * (2 * SIZE // 256))
    return directory


def recall(found: Survey, memory: Memory) -> Identity:
    return remembered(found, memory) or learn(found, memory)


@dataclass
class Node:
    """A machine with a memory, which looks at sources, and counts the bytes of weights it reads."""

    memory: Memory
    read: list[str]

    def survey(self, directory: Path) -> Survey:
        return look(str(directory), None, {})

    def recall(self, directory: Path) -> Identity:
        return recall(self.survey(directory), self.memory)

    def in_full(self, directory: Path) -> str:
        found = self.survey(directory)
        return read_in_full(found, recall(found, self.memory), self.memory).ways["blake3"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    read: list[str] = []

    def counted(path: Path, *more: object) -> str:
        read.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(identities, "digest_file", counted)
    return Node(Memory(tmp_path / "state"), read)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def other_node(tmp_path: Path) -> Node:
    return Node(Memory(tmp_path / "other-state"), [])


def test_nothing_is_known_of_the_weights_until_they_are_read(node: Node, model: Path) -> None:
    assert node.recall(model).ways == {}
    assert "model.safetensors" not in node.read
    digest = node.in_full(model)
    assert node.read.count("model.safetensors") == 1
    assert node.recall(model).ways == {"blake3": digest}


def test_what_is_remembered_is_not_read_again(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = node.in_full(model)
    node.read.clear()
    monkeypatch.setattr(lookalike, "sample", lambda _: pytest.fail("a sample was read"))
    assert node.in_full(model) == digest
    assert node.recall(model).ways == {"blake3": digest}
    assert node.read == []


def test_the_same_files_elsewhere_are_the_same_model(
    node: Node, model: Path, tmp_path: Path
) -> None:
    digest = node.in_full(model)
    shutil.copytree(model, tmp_path / "copy")
    assert other_node(tmp_path).in_full(tmp_path / "copy") == digest


def test_a_copy_that_kept_its_times_is_known_by_a_sample(
    node: Node, model: Path, tmp_path: Path
) -> None:
    digest = node.in_full(model)
    node.read.clear()
    # copystat keeps mtimes, as an image layer does; inodes and ctimes are others.
    model.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", model)
    assert node.recall(model).ways == {"blake3": digest}
    assert "model.safetensors" not in node.read


def test_a_copy_into_an_image_layer_is_known_by_a_sample(
    node: Node, model: Path, tmp_path: Path
) -> None:
    os.utime(model / "model.safetensors", ns=(0, 1_700_000_000_123_456_789))
    digest = node.in_full(model)
    model.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", model)
    # Without the parts of a second; any other part is another time.
    os.utime(model / "model.safetensors", ns=(0, 1_700_000_000_000_000_000))
    assert node.recall(model).ways == {"blake3": digest}
    os.utime(model / "model.safetensors", ns=(0, 1_700_000_000_500_000_000))
    assert node.recall(model).ways == {}


def test_a_lookalike_beside_it_is_no_copy(node: Node, model: Path, tmp_path: Path) -> None:
    node.in_full(model)
    shutil.copytree(model, tmp_path / "fine-tune")
    assert node.recall(tmp_path / "fine-tune").ways == {}


def test_times_that_were_set_to_an_epoch_tell_nothing(
    node: Node, model: Path, tmp_path: Path
) -> None:
    os.utime(model / "model.safetensors", (1, 1))
    node.in_full(model)
    model.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", model)
    assert node.recall(model).ways == {}


def test_a_copy_with_other_times_is_read_in_full(node: Node, model: Path, tmp_path: Path) -> None:
    node.in_full(model)
    shutil.copytree(model, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    assert node.recall(tmp_path / "copy").ways == {}


def flip(path: Path, position: int) -> None:
    """Change one byte in place, and put the mtime back."""
    status = path.stat()
    position %= status.st_size
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def as_image(found: Survey, undated: str) -> Survey:
    """Return a look as it is on an image whose times its builder set, one inode as the next."""
    weights, model_files = (
        tuple(file._replace(inode=2, ctime_ns=file.mtime_ns) for file in files)
        for files in (found.weights, found.model_files)
    )
    return found._replace(weights=weights, model_files=model_files, undated=undated)


@pytest.mark.parametrize(("then", "now"), [("", ""), ("disk 1", "disk 2"), ("disk 1", "")])
def test_stamps_that_the_builder_of_an_image_set_prove_nothing_on_another_mount(
    node: Node, model: Path, then: str, now: str
) -> None:
    for path in model.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    image = as_image(node.survey(model), then)
    before = read_in_full(image, recall(image, node.memory), node.memory)
    flip(model / "model.safetensors", -SIZE // 3)
    image = as_image(node.survey(model), now)
    known = recall(image, node.memory)
    assert known.ways == {}
    assert read_in_full(image, known, node.memory).ways["blake3"] != before.ways["blake3"]


def test_stamps_on_an_image_count_while_it_stays_mounted(node: Node, model: Path) -> None:
    image = as_image(node.survey(model), "disk 1")
    digest = read_in_full(image, recall(image, node.memory), node.memory).ways
    node.read.clear()
    assert recall(image, node.memory).ways == digest
    assert node.read == []


@pytest.mark.parametrize("position", [-1, -SIZE // 2, -SIZE - 1])
def test_one_changed_byte_is_another_model(node: Node, model: Path, position: int) -> None:
    digest = node.in_full(model)
    path = model / "model.safetensors"
    flip(path, path.stat().st_size + position)
    os.utime(path)
    assert node.in_full(model) != digest


def test_a_byte_changed_behind_the_mtimes_back_is_seen_by_ctime_and_sample(
    node: Node, model: Path
) -> None:
    digest = node.in_full(model)
    path = model / "model.safetensors"
    outlive_ctime(path)
    flip(path, path.stat().st_size - 1)
    assert node.recall(model).ways == {}
    assert node.in_full(model) != digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "added.jinja"])
def test_another_model_file_is_another_model(node: Node, model: Path, name: str) -> None:
    digest = node.in_full(model)
    before = node.recall(model).config_digest
    (model / name).write_text('{"b": 2}')
    assert node.in_full(model) != digest
    assert node.recall(model).config_digest != before


def test_a_weight_under_another_name_is_another_model(node: Node, model: Path) -> None:
    digest = node.in_full(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert node.in_full(model) != digest


def test_files_that_belong_to_no_model_do_not_count(node: Node, model: Path) -> None:
    digest = node.in_full(model)
    (model / "README.md").write_text("hello")
    (model / ".cache").mkdir()
    assert node.in_full(model) == digest


def test_a_sample_sees_begin_middle_and_end_of_every_tensor(node: Node, model: Path) -> None:
    found = node.survey(model)
    before = sample(found)
    path = model / "model.safetensors"
    size = path.stat().st_size
    for position in (size - 1, size - SIZE, size - SIZE // 2, size - SIZE - 1, size - 2 * SIZE):
        flip(path, position)
        assert sample(found) != before, position
        flip(path, position)
    assert sample(found) == before


def test_weights_of_any_form_are_sampled(node: Node, tmp_path: Path) -> None:
    model = make_model(tmp_path / "pickled")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    digest = node.in_full(model)
    assert node.recall(model).ways == {"blake3": digest}


def test_the_hubs_own_digests_identify_without_reading(node: Node, model: Path) -> None:
    blob = "cd" * 32
    (model / "model.safetensors").rename(model.parent / blob)
    (model / "model.safetensors").symlink_to(f"../{blob}")
    found = node.recall(model)
    assert set(found.ways) == {"sha256"}
    assert "model.safetensors" not in node.read
    # The same blob in a cache elsewhere.
    shutil.copytree(model, model.parent / "cache" / "copy", symlinks=True)
    shutil.copy2(model.parent / blob, model.parent / "cache" / blob)
    assert node.recall(model.parent / "cache" / "copy").ways == found.ways


def linked(model: Path) -> Path:
    """Make the weights a blob of the hub's cache, with its right name; return the blob."""
    path = model / "model.safetensors"
    blob = model.parent / hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(blob)
    path.symlink_to(f"../{blob.name}")
    return blob


def test_a_blob_that_was_written_to_through_its_link_has_lost_its_name(
    node: Node, model: Path
) -> None:
    blob = linked(model)
    assert set(node.recall(model).ways) == {"sha256"}
    outlive_ctime(blob)
    flip(model / "model.safetensors", 5000)
    assert node.recall(model).ways == {}
    # Nor does it come back because something else moves.
    (model / "config.json").write_text('{"a": 2}')
    assert node.recall(model).ways == {}
    node.in_full(model)
    (model / "config.json").write_text('{"a": 3}')
    assert node.recall(model).ways == {}


def test_a_blob_that_was_written_to_before_anybody_looked_is_read(node: Node, model: Path) -> None:
    blob = linked(model)
    outlive_ctime(blob)
    flip(blob, 5000)
    os.utime(blob)
    assert node.recall(model).ways == {}
    node.in_full(model)
    assert set(node.recall(model).ways) == {"blake3"}


def test_a_blob_that_only_moved_has_its_name_back_once_it_was_read(node: Node, model: Path) -> None:
    blob = linked(model)
    before = node.recall(model).ways
    outlive_ctime(blob)
    os.utime(blob)
    assert node.recall(model).ways == {}
    node.in_full(model)
    assert node.recall(model).ways.items() >= before.items()
    (model / "config.json").write_text('{"a": 2}')
    assert set(node.recall(model).ways) == {"sha256"}


def test_a_file_that_changes_while_it_is_read_gives_no_identity(node: Node, model: Path) -> None:
    found = node.survey(model)
    known = recall(found, node.memory)
    [file] = found.weights
    moved = found._replace(weights=(file._replace(mtime_ns=file.mtime_ns - 1),))
    with pytest.raises(StoreError, match="changed while"):
        read_in_full(moved, known, node.memory)


def test_a_file_that_goes_away_gives_no_identity(node: Node, model: Path) -> None:
    found = node.survey(model)
    known = recall(found, node.memory)
    (model / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        read_in_full(found, known, node.memory)


def test_a_source_that_hangs_is_what_it_was_when_last_seen(node: Node, model: Path) -> None:
    word = str(model)
    assert last_remembered(word, None, {}, node.memory) is None
    remember_word(node.survey(model), node.recall(model), None, {}, node.memory)
    digest = node.in_full(model)
    remembered = last_remembered(word, None, {}, node.memory)
    assert remembered is not None
    assert last_remembered(word, "another revision", {}, node.memory) is None
    assert remembered.ways == {"blake3": digest}
    assert remembered.config_digest == node.recall(model).config_digest


def test_without_a_memory_it_is_read_each_time(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    node = Node(Memory(blocked), [])
    assert node.in_full(model) == node.in_full(model)


def test_what_is_not_here_or_a_checkpoint_has_no_identity(node: Node, model: Path) -> None:
    assert node.recall(model.parent / "nothing") == Identity({}, {})
    manifest = make_checkpoint(model.parent)
    assert node.recall(model.parent / manifest.name) == Identity({}, {})
