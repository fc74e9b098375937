"""What the ledger's lines add up to, whatever state it is in."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import make_key

from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.insight.past import figures
from entrypoint.store.retention import family_of

HOST = "here"


def manifest(**save: Any) -> Manifest:
    key = make_key()
    return Manifest(
        name="tiny-tp2-bf16-vllm0.32.0-0123456789ab",
        key=key,
        source=Source(name="org/tiny", revision=None, identity={}),
        layout=Layout(tp=2, pp=1),
        files=(),
        decisions={},
        proof=None,
        save={"host": HOST, "seconds": 7.5, "source_bytes": 4_000_000_000, **save},
        created_at="2026-01-01T00:00:00Z",
    )


OURS = {"family": family_of(manifest()), "family_name": "tiny-tp2-bf16"}


def boot(number: int, checkpoint: str | None = "tiny-a", **more: Any) -> dict[str, Any]:
    action = "reuse" if checkpoint else "serve-source"
    line = {"event": "attempt", "boot": f"b{number}", "time": 1000.0 * number, "action": action}
    return line | {"checkpoint": checkpoint} | OURS | more


def line(number: int, event: str, seconds: object) -> dict[str, Any]:
    return {"event": event, "boot": f"b{number}", "seconds": seconds}


LEDGER = [
    line(1, "source-loaded", 9.0),
    line(1, "save.done", 40.0) | OURS,
    boot(1),
    line(1, "loaded", 3.0),
    boot(2),
    line(2, "loaded", 5.0),
    boot(3),
    line(3, "loaded", 4.0),
]


def test_a_deployments_boots_and_times_come_together() -> None:
    [found] = figures(LEDGER, [], HOST, None)
    assert found.name == "tiny-tp2-bf16"
    assert (found.boots, found.releases, found.span) == (3, (3,), 2000.0)
    assert (found.source, found.load, found.step, found.paid) == (9.0, 4.0, "save", 40.0)
    assert not found.at_least


def test_what_was_paid_last_counts() -> None:
    copied = [*LEDGER, line(4, "copy.done", 2.0) | OURS]
    [found] = figures(copied, [], HOST, None)
    assert (found.step, found.paid) == ("copy", 2.0)


def test_a_tee_times_the_source_as_it_serves_it() -> None:
    entries = [boot(1, None, action="tee"), line(1, "loaded", 9.0), line(1, "tee.done", 2.0)]
    [found] = figures(entries, [], HOST, None)
    assert (found.boots, found.source, found.load) == (1, 9.0, None)
    assert (found.step, found.paid) == ("tee", 2.0)


@pytest.mark.parametrize(
    ("checkpoints", "releases"),
    [
        (["a", "a", "b"], (2, 1)),
        # Another generation is the same release saved again.
        (["a", "a-g2", "b"], (2, 1)),
        # What was rolled back to goes on.
        (["a", "b", "a"], (2, 1)),
        ([None, "a", None, "b"], (3, 1)),
        ([None, None], ()),
        ([], ()),
    ],
)
def test_releases_are_told_apart_by_their_checkpoints(
    checkpoints: list[str | None], releases: tuple[int, ...]
) -> None:
    entries = [boot(n, each) for n, each in enumerate(checkpoints)]
    found = figures(entries, [manifest()], HOST, None)
    assert [each.releases for each in found] == [releases]


def test_a_line_from_before_families_tells_by_its_manifest() -> None:
    made = manifest()
    old = {k: v for k, v in boot(1).items() if k not in OURS} | {"manifest": made.digest}
    [found] = figures([old, line(1, "loaded", 3.0)], [made], HOST, None)
    assert (found.boots, found.load, found.name) == (1, 3.0, "tiny-tp2-bf16")


@pytest.mark.parametrize(
    ("host", "rate", "source", "step", "paid"),
    [
        (HOST, None, None, "save", 7.5),
        (HOST, 2e9, 2.0, "save", 7.5),
        # Copied, before copies were timed.
        ("elsewhere", None, None, "copy", None),
    ],
)
def test_a_checkpoint_tells_what_no_line_does(
    host: str, rate: float | None, source: float | None, step: str, paid: float | None
) -> None:
    [found] = figures([], [manifest(host=host)], HOST, rate)
    assert (found.source, found.step, found.paid) == (source, step, paid)
    assert found.at_least is (source is not None)


def test_a_measured_source_is_no_estimate() -> None:
    [found] = figures(LEDGER, [manifest()], HOST, 2e9)
    assert (found.source, found.at_least) == (9.0, False)


@pytest.mark.parametrize("odd", ["9", None, -1, True, 1e300, [], {}])
def test_odd_lines_tell_nothing(odd: object) -> None:
    entries = [*LEDGER, line(3, "loaded", odd), {"boot": odd}, {}, boot(9, time=odd, action=odd)]
    [found] = figures(entries, [], HOST, None)
    assert (found.boots, found.load, found.span) == (3, 4.0, 2000.0)


def test_boots_of_another_model_are_another_line() -> None:
    other = boot(9, "other-a", family="other", family_name="other-tp1")
    assert [each.name for each in figures([*LEDGER, other], [], HOST, None)] == [
        "other-tp1",
        "tiny-tp2-bf16",
    ]
