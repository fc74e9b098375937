"""A checkpoint that tells the config of a model which is not on this node."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint import stand_in
from entrypoint.store.directory import DirectoryStore

WORD = "test/tiny"


def test_a_named_checkpoint_lends_its_model_files_and_nothing_else(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path)
    found = stand_in.find([DirectoryStore(tmp_path)], manifest.name, "any/word", None)
    assert found is not None
    assert found.name == manifest.name
    with found.laid_out() as directory:
        lent = [path for path in Path(directory).rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)) for path in lent} == set(found.model_files)
    assert found.model_files
    assert not Path(directory).exists()


@pytest.mark.parametrize("commit", [None, "f" * 40])
def test_without_the_very_commit_nothing_stands_in(commit: str | None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert stand_in.find([DirectoryStore(tmp_path)], None, WORD, commit) is None
