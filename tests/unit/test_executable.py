"""Finding the vllm to become: what is said of one that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.engine.executable import locate
from entrypoint.errors import ExecError, exit_code_of


@pytest.mark.parametrize(
    ("word", "says", "code"),
    [
        ("vllm-of-nobody", "is not on PATH", 127),
        ("{}/absent", "is not there", 127),
        ("{}/plain", "is not executable", 126),
    ],
)
def test_what_cannot_be_run_is_named_with_why(
    tmp_path: Path, word: str, says: str, code: int
) -> None:
    (tmp_path / "plain").write_text("text\n")
    with pytest.raises(ExecError, match=says) as caught:
        locate(word.format(tmp_path), {"PATH": str(tmp_path)})
    assert exit_code_of(caught.value) == code
