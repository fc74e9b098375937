"""What a long step says of itself now and then, where nobody watches a bar."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from entrypoint import progress
from entrypoint.log import Log
from entrypoint.progress import Progress
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address


def test_until_something_is_done_it_says_what_goes_on_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0)
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    log, status = Log("", descriptor=descriptor), Reporter(None, "", Address())
    with Progress(log, status, "save", 2048, first="vLLM is loading the model") as step:
        step.at(0)
        step.at(1024)
    os.close(descriptor)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "shardboot: save.progress: vLLM is loading the model"
    assert re.fullmatch(r"shardboot: save.progress: 1.0 KiB of 2.0 KiB, .*/s, \d+ s to go", second)
