"""A snapshot in the hub's cache: what its blobs' names and its commit are taken for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from blackbox.harness import House, make_source

from entrypoint.checkpoint.inspect import read_manifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(house: House) -> Path:
    """Lay out this house's model as the hub's client does; return the snapshot."""
    repository = house.root / "hub" / "models--org--name"
    found = repository / "snapshots" / COMMIT
    for directory in (found, repository / "blobs"):
        directory.mkdir(parents=True)
    for path in house.model.iterdir():
        data = path.read_bytes()
        as_git = hashlib.sha1(b"blob %d\0" % len(data) + data)  # noqa: S324 - as git does
        is_large = path.suffix == ".safetensors"
        blob = repository / "blobs" / (hashlib.sha256(data) if is_large else as_git).hexdigest()
        blob.write_bytes(data)
        (found / path.name).symlink_to(f"../../blobs/{blob.name}")
    return found


def commit_of_save(house: House) -> str | None:
    [name] = house.store.names()
    return read_manifest(house.store.path(name)).source.revision


def boot(house: House, snapshot: Path, **more: object) -> list[str]:
    return house.run("serve", snapshot, "-tp", 2, **more).events


def test_a_checkpoint_of_a_snapshot_is_one_of_its_commit(house: House, snapshot: Path) -> None:
    assert boot(house, snapshot)[-1] == "local.hit"
    assert commit_of_save(house) == COMMIT


def edit_weights(snapshot: Path) -> None:
    path = snapshot / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")


def edit_config(snapshot: Path) -> None:
    (snapshot / "tokenizer.json").write_text('{"edited": 1}')


def replace_config(snapshot: Path) -> None:
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").write_text("{}")


def add_template(snapshot: Path) -> None:
    (snapshot / "chat_template.jinja").write_text("mine")


@pytest.mark.parametrize("edit", [edit_weights, edit_config, replace_config, add_template])
@pytest.mark.parametrize("is_relinked", [False, True])
def test_a_checkpoint_of_an_edited_snapshot_is_one_of_no_commit(
    house: House, snapshot: Path, edit: Callable[[Path], None], is_relinked: bool
) -> None:
    edit(snapshot)
    if is_relinked:
        # As a copy of the cache may have it, that wrote all links last.
        path = snapshot / "model.safetensors"
        target = path.readlink()
        path.unlink()
        path.symlink_to(target)
    assert boot(house, snapshot)[-1] == "local.hit"
    assert commit_of_save(house) is None


def test_weights_that_are_overwritten_through_their_link_are_another_model(
    house: House, snapshot: Path, tmp_path: Path
) -> None:
    boot(house, snapshot)
    assert boot(house, snapshot)[-1] == "local.hit"
    make_source(tmp_path / "tuned", seed=7)
    weights = (tmp_path / "tuned" / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").write_bytes(weights)
    events = boot(house, snapshot, SHARDBOOT_ON_MISS="source")
    assert events[-2:] == ["source.read", "local.foreign"]
