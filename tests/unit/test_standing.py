"""What a boot has come to, for every phase that it can be in."""

from __future__ import annotations

from typing import Any

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.health.ask import Answer
from entrypoint.health.standing import OVER, Standing, answered, stand
from entrypoint.state.status import Address, Life, Status

NOW = 1000.0
GIB = 1 << 30
COPYING: dict[str, Any] = {
    "phase": "copying",
    "done": int(3.1 * GIB),
    "total": 9 * GIB,
    "eta": 12.0,
}
NOTES = {
    "loading": {"time": NOW - 8},
    "loaded": {"time": NOW - 3, "seconds": 5.25},
    "stopped": {},
    "fell-back": {},
    "objection": {},
    "healthy": {},
}


def at(phase: str = "starting", **more: Any) -> Status:
    return Status(boot="b", phase=phase, since=NOW - 20, tier="local")._replace(**more)


def notes(*events: str) -> list[dict[str, Json]]:
    return [{"boot": "b", "event": event, **NOTES[event]} for event in events]


@pytest.mark.parametrize(
    ("status", "events", "life", "line"),
    [
        (at("deciding"), (), "here", "deciding: for 20 s"),
        (at(**COPYING), (), "here", "copying: 3.1 GiB of 9.0 GiB, 12 s to go"),
        (at(**COPYING | {"eta": 0.0}), (), "here", "copying: 3.1 GiB of 9.0 GiB"),
        (at(**COPYING), (), "elsewhere", "copying: 3.1 GiB of 9.0 GiB, 12 s to go"),
        (at("saving"), (), "here", "saving: for 20 s"),
        (
            at("proving", text="loads the source again"),
            (),
            "here",
            "proving: loads the source again",
        ),
        (at("waiting", text="process 7 copies"), (), "here", "waiting: process 7 copies"),
        (at(), (), "here", "starting: vLLM on a checkpoint, for 20 s"),
        (at(tier="source"), (), "here", "starting: vLLM on the source, for 20 s"),
        (at(), ("loading",), "here", "loading: the weights, for 8 s"),
        (at(), ("loading",), "elsewhere", "loading: the weights, for 8 s"),
        (
            at(),
            ("loading", "objection"),
            "here",
            "loading: the checkpoint is not served; the source is loaded",
        ),
        (
            at(),
            ("loading", "loaded"),
            "here",
            "loaded: the weights, in 5.25 s; vLLM has warmed up for 3 s",
        ),
        # Two replicas, of which one is there.
        (at(), ("loading", "loading", "loaded"), "here", "loading: the weights, for 8 s"),
        (at("failed", reason="a.b", text="why"), (), "here", "failed: a.b: why"),
        (at("failed", reason="a.b", text="why"), (), "gone", "failed: a.b: why"),
        (at("deciding"), (), "gone", "failed: exited while deciding"),
        (at(**COPYING), (), "gone", "failed: exited while copying"),
        (at(), (), "gone", "failed: exited while starting"),
        (at(), ("loading",), "gone", "failed: exited while loading the weights"),
        (at(), ("loading", "stopped"), "gone", "stopped: was told to stop while loading"),
        (at(), ("loading", "loaded"), "gone", "failed: exited after loading, before it served"),
        (at(), ("loading", "fell-back"), "gone", "failed: exited after loading, before it served"),
        (at(healthy=1.0), ("loading",), "gone", "stopped: exited after it had served"),
        (at(), ("loading", "loaded", "healthy"), "gone", "stopped: exited after it had served"),
        (at("starting", text="\x1b[2Jx"), (), "here", "starting: vLLM on a checkpoint, for 20 s"),
        (at("waiting", text="a\nb"), (), "here", "waiting: a\\nb"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value else "",
)
def test_each_phase_has_its_line_and_is_not_healthy(
    status: Status, events: tuple[str, ...], life: Life, line: str
) -> None:
    found = stand(status, notes(*events), life, NOW)
    assert (found.line, found.is_healthy) == (line, False)
    after_exec = status.phase == "starting" and life != "gone"
    assert found.is_asked == after_exec
    assert (found.phase in OVER) == (life == "gone" or status.phase == "failed")


@pytest.mark.parametrize(
    ("status", "events", "life", "phase", "is_healthy"),
    [
        (at(), (), "here", "starting", False),
        (at(), ("loading",), "here", "loading", False),
        (at(), ("loading", "loaded"), "here", "serving", True),
        (at(), ("loading", "loaded"), "gone", "failed", False),
        (at(), ("loading", "fell-back"), "here", "serving", True),
        (at(tier="source"), (), "here", "serving", True),
        (at(tier="source"), (), "gone", "failed", False),
        (at("copying"), (), "here", "copying", False),
        # Nothing of it is in the ledger's end any more.
        (at(healthy=1.0), (), "here", "serving", True),
        (at(healthy=1.0), (), "elsewhere", "serving", True),
        (at(healthy=1.0), (), "gone", "stopped", False),
    ],
)
def test_a_node_without_http_goes_by_its_loader_and_its_process(
    status: Status, events: tuple[str, ...], life: Life, phase: str, is_healthy: bool
) -> None:
    status = status._replace(address=Address(headless=True))
    found = stand(status, notes(*events), life, NOW)
    assert (found.phase, found.is_healthy, found.is_asked) == (phase, is_healthy, False)


LOADING = Standing("loading", "the weights, for 8 s", is_asked=True)
REFUSED = Answer(None, "Connection refused", is_there=False)


@pytest.mark.parametrize(
    ("status", "answer", "line", "is_healthy"),
    [
        (at(), Answer(200, ""), "serving: local on http://*:8000", True),
        (
            at(),
            Answer(200, "it wants a certificate"),
            "serving: local on http://*:8000; it wants a certificate",
            True,
        ),
        (at(), REFUSED, "loading: the weights, for 8 s", False),
        (at(), Answer(503, "answers 503"), "unhealthy: http://*:8000: answers 503", False),
        (at(), Answer(None, "no answer"), "unhealthy: http://*:8000: no answer", False),
        (at(healthy=1.0), Answer(200, ""), "serving: local on http://*:8000", True),
        (at(healthy=1.0), REFUSED, "unhealthy: http://*:8000: Connection refused", False),
        (
            at(tier="source", address=Address(assumed=True)),
            Answer(200, ""),
            "serving: source on http://*:8000; vLLM was not asked for its address",
            True,
        ),
    ],
)
def test_vllms_answer_decides(status: Status, answer: Answer, line: str, is_healthy: bool) -> None:
    found = answered(LOADING, status, answer)
    assert (found.line, found.is_healthy) == (line, is_healthy)
