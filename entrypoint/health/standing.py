"""What a boot has come to, told from what it left, whether it runs, and what vLLM answers. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import one_line
from entrypoint.health.ask import Answer
from entrypoint.log import human_bytes
from entrypoint.state.status import Life, Status

Notes = Sequence[Mapping[str, Json]]
"""What the ledger says of one boot, oldest first."""

OVER: Final = ("failed", "stopped")
"""Phases that end a boot."""


class Standing(NamedTuple):
    """The phase that a boot is in, whether vLLM serves, and a line for people.

    Phases are those of `Status`, and: loading, loaded, serving, unhealthy (it served before),
    restarting (under a supervisor), stopped. `is_asked`: an answer of vLLM can make it serving.
    """

    phase: str
    text: str
    is_healthy: bool = False
    is_asked: bool = False

    @property
    def line(self) -> str:
        """Phase and text."""
        return one_line(f"{self.phase}: {self.text}")


def stand(status: Status, notes: Notes, life: Life, now: float) -> Standing:
    """Return what a boot has come to as far as that is known without asking vLLM."""
    if status.phase == "failed":
        return Standing("failed", f"{status.reason}: {status.text}")
    if life == "gone":
        return _ended(status, notes)
    if status.phase != "starting":
        return Standing(status.phase, _doing(status, now))
    if status.address.headless:
        return _headless(status, notes, now)
    return _under_way(status, notes, now)._replace(is_asked=True)


def followed(standing: Standing) -> Standing:
    """Return what it is at where a supervisor runs: that the server is gone is not the end."""
    return Standing("restarting", f"the server {standing.text}; its supervisor starts the next one")


def answered(standing: Standing, status: Status, answer: Answer) -> Standing:
    """Return what the standing is, given vLLM's answer."""
    if answer.is_ok:
        return Standing("serving", _where(status, answer), is_healthy=True)
    if status.healthy or answer.is_there:
        return Standing("unhealthy", f"{status.address}: {answer.text}")
    return standing


def _where(status: Status, answer: Answer) -> str:
    assumed = "vLLM was not asked for its address" if status.address.assumed else ""
    where = f"{status.tier} on {status.address}"
    return "; ".join(text for text in (where, answer.text, assumed) if text)


def _ended(status: Status, notes: Notes) -> Standing:
    """Tell how far a process came that is gone; nobody saw its exit status."""
    events = [note.get("event") for note in notes]
    if status.healthy or "healthy" in events:
        return Standing("stopped", "exited after it had served")
    if "stopped" in events:
        return Standing("stopped", "was told to stop while loading")
    if events.count("loading") > events.count("loaded") and "fell-back" not in events:
        return Standing("failed", "exited while loading the weights")
    if "loaded" in events or "fell-back" in events:
        return Standing("failed", "exited after loading, before it served")
    return Standing("failed", f"exited while {status.phase}")


def _doing(status: Status, now: float) -> str:
    """Say what boot does before exec."""
    if status.text:
        return status.text
    if not status.done:
        return f"for {max(0, now - status.since):.0f} s"
    left = f", {status.eta:.0f} s to go" if status.eta else ""
    return f"{human_bytes(status.done)} of {human_bytes(status.total)}{left}"


def _under_way(status: Status, notes: Notes, now: float) -> Standing:
    """Tell how far vLLM is by what its loader noted; the source's own loader notes nothing."""
    events = [note.get("event") for note in notes]
    if "objection" in events or "fell-back" in events:
        return Standing("loading", "the checkpoint is not served; the source is loaded")
    if events.count("loading") > events.count("loaded"):
        seconds = now - _time(notes, "loading", status.since)
        return Standing("loading", f"the weights, for {max(0, seconds):.0f} s")
    if "loaded" in events:
        took = next((n.get("seconds") for n in notes if n.get("event") == "loaded"), None)
        seconds = now - _time(notes, "loaded", status.since)
        text = f"the weights, in {took} s; vLLM has warmed up for {max(0, seconds):.0f} s"
        return Standing("loaded", text)
    what = "the source" if status.tier == "source" else "a checkpoint"
    return Standing("starting", f"vLLM on {what}, for {max(0, now - status.since):.0f} s")


def _headless(status: Status, notes: Notes, now: float) -> Standing:
    """Tell what becomes of a node without HTTP: by its own loader's note, and its process.

    Once seen healthy it stays so while it runs: the note is not in the ledger's end for ever.
    """
    under_way = _under_way(status, notes, now)
    if status.healthy or under_way.phase == "loaded":
        return Standing("serving", "no HTTP on this node; its weights are loaded", is_healthy=True)
    if status.tier == "source" or any(note.get("event") == "fell-back" for note in notes):
        text = "no HTTP on this node, and no note of the source's loader; its process runs"
        return Standing("serving", text, is_healthy=True)
    return under_way


def _time(notes: Notes, event: str, otherwise: float) -> float:
    found = [n.get("time") for n in notes if n.get("event") == event]
    return next((t for t in found if isinstance(t, float)), otherwise)
