"""What scripts/rolling-upgrade makes of signals and of errors that nobody thought of."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the script as a module; what it does to signals ends with the test."""
    monkeypatch.syspath_prepend(SCRIPTS)
    loader = SourceFileLoader("rolling_upgrade", str(SCRIPTS / "rolling-upgrade"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    made: Any = module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(made)
    before = {number: signal.getsignal(number) for number in made.SIGNALS}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def raises(error: BaseException) -> Callable[[], str]:
    def act() -> str:
        raise error

    return act


def signalled() -> str:
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    return "requests go to a again"


def upgrade(forward: Callable[[], str], back: Callable[[], str]) -> SimpleNamespace:
    at, one = "4/4 move", SimpleNamespace(name="a")
    return SimpleNamespace(
        look=lambda: None, forward=forward, back=back, at=at, is_over=False, new=one, old=one
    )


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (raises(OSError(28, "No space left on device")), "OSError: [Errno 28] No space left on"),
        (raises(UnicodeError("odd")), "UnicodeError: odd (test_rolling_upgrade.py:"),
        (signalled, "signal 15"),
    ],
)
def test_whatever_ends_a_step_is_followed_by_the_way_back(
    program: Any,
    capfd: pytest.CaptureFixture[str],
    forward: Callable[[], str],
    expected: str,
) -> None:
    assert program.perform(upgrade(forward, signalled)) == program.AS_BEFORE
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"rolling-upgrade: failed at 4/4 move: {expected}")
    assert last.endswith("; requests go to a again")


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_way_back_that_fails_is_for_somebody_to_look_at(
    program: Any, capfd: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    done = program.perform(upgrade(raises(program.StepError("b fell ill")), raises(kind("odd"))))
    assert done == program.LOOK_AT_IT
    said = capfd.readouterr().err
    assert f"b fell ill; and the way back failed: {kind.__name__}: odd (" in said
