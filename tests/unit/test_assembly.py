"""Reading the source beside a save: for as long as the save may take, and no longer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint import assembly
from entrypoint.errors import SaveError


def test_a_source_that_is_not_read_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("entrypoint.model.identity.read_in_full", lambda *_: time.sleep(1000))
    subject: Any = SimpleNamespace(source=SimpleNamespace(directory="/model"), identity=None)
    memory: Any = None
    reading = assembly.Reading(subject, memory)
    reading.start()
    with pytest.raises(SaveError, match="/model was not read in time") as caught:
        reading.result(0.1)
    assert caught.value.reason == "save.timeout"
