"""Which of a source's files a checkpoint carries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.checkpoint.entry import check_path
from entrypoint.errors import ManifestError
from entrypoint.model import files

NAMES = ("tokenizer.json", "a b.txt", "consolidated.safetensors", "ünïcode.model", "x" * 250)
ODD = ("a\xa0b.txt", "a\nb.json", "a\\b.txt", "caf\udce9.txt", "consolidated\u2028.safetensors")
DEEP = "/".join("abcdefghijklmnopq")


@pytest.mark.parametrize("path", [*NAMES, *ODD, DEEP, DEEP[2:], f"sub/{ODD[0]}"])
def test_what_no_manifest_may_name_is_not_carried(tmp_path: Path, path: str) -> None:
    place = tmp_path / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("")
    assert files.walk(str(tmp_path)) == [path]
    try:
        check_path(path, "path")
    except ManifestError:
        is_named = False
    else:
        is_named = True
    is_carried = files.is_copied(path) if not files.is_weights(path) else files.is_marker(path)
    assert is_carried == is_named
    # It may be what a person looks for: another source all the same.
    assert files.is_weights(path) or files.is_model_file(os.fspath(tmp_path), path)
