"""The status page: what it says of what was seen, and that nothing it shows can speak."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from checkpoints import make_key

from entrypoint.health.check import Report
from entrypoint.health.standing import Standing
from entrypoint.insight.timeline import timelines
from entrypoint.sidecar.compare import differs, rows
from entrypoint.sidecar.history import Booted, Told
from entrypoint.sidecar.loop import Job, Record
from entrypoint.sidecar.markup import Markup, element, together
from entrypoint.sidecar.metrics import Sight
from entrypoint.sidecar.page import page
from entrypoint.sidecar.remedies import REMEDIES, UNKNOWN, remedy
from entrypoint.sidecar.view import DAMAGED, UNREADABLE, Seen, StoreView
from entrypoint.sidecar.waterfall import waterfalls
from entrypoint.state.status import Status

NOW = 1_800_000_000.0
EVIL = "<script>alert('x')</script>\"&\u202e"


class Texts(HTMLParser):
    """All elements of a page, and all its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.said += data + "\n"


def seen(name: str, created: float = 1.0, **facts: Any) -> Seen:
    base = Seen(
        *(name, "complete", "", f"content of {name}"),
        made_for=make_key(),
        source="test/tiny",
        created=created,
        ranks=(0, 1),
        world=2,
        bytes=4096,
    )
    return base._replace(**facts)


def sight(local: list[Seen], shared: list[Seen], **more: Any) -> Sight:
    views = {"local": StoreView("/local", (*local,)), "shared": StoreView("/shared", (*shared,))}
    return Sight(stores=views)._replace(**more)


def told_by(page_: str) -> str:
    return Texts(page_).said


RUNS = seen("runs", running=True)
BOOTED = Booted("b", NOW - 10, "of", "local", "healthy", "local.hit", is_refused=False)


def test_a_text_is_escaped_and_markup_is_not() -> None:
    inner = element("b", "<i>", class_="x", data_label='"')
    assert inner == '<b class="x" data-label="&quot;">&lt;i&gt;</b>'
    assert element("p", inner, " & ") == f"<p>{inner} &amp; </p>"
    assert together([inner, inner + "<"]).startswith(f"{inner}&lt;b")
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert isinstance(together([]), Markup)


def test_what_others_have_named_is_shown_and_does_nothing() -> None:
    evil = seen(EVIL, state=DAMAGED, text=EVIL, created_at=EVIL, made_for=make_key(vllm=EVIL))
    report = Report(
        Status(boot=EVIL, checkpoint=EVIL, reason=EVIL, tier=EVIL, ranks=EVIL, total=2, done=1),
        Standing("copying", EVIL),
    )
    line: dict[str, Any] = {
        "boot": EVIL,
        "event": "attempt",
        "action": "reuse",
        "time": NOW,
        "family_name": EVIL,
    }
    phases = [{"phase": EVIL, "start": NOW - 2, "end": NOW}]
    [timeline] = timelines([line | {"phases": phases}], (), lambda _: False, NOW)
    booted = Booted(EVIL, NOW, EVIL, EVIL, EVIL, EVIL, is_refused=True, timeline=timeline)
    told = Told({}, {}, {EVIL: 1}, (booted,))
    job = Job(EVIL, 60.0, list)
    job.record = Record(error=EVIL)
    made = page(EVIL, sight([RUNS, evil], [evil], boots=(report,), told=told), [job], NOW)
    found = Texts(made)
    assert found.tags & {"script", "img", "a", "iframe"} == set()
    assert found.names <= {
        "charset",
        "class",
        "content",
        "data-label",
        "lang",
        "max",
        "name",
        "open",
        "style",
        "value",
    }
    assert "\u202e" not in made
    assert found.said.count("<script>alert('x')</script>\"&\\u202e") > 10


def test_a_boot_is_a_waterfall() -> None:
    phases = [
        {"phase": "deciding", "start": 100.0, "end": 101.0},
        {"phase": "copying", "start": 101.0, "end": 104.0},
    ]
    attempt: dict[str, Any] = {"boot": "b", "event": "attempt", "action": "reuse", "time": 104.0}
    lines: list[dict[str, Any]] = [
        attempt | {"phases": phases},
        {"boot": "b", "event": "loading", "time": 106.0},
        {"boot": "b", "event": "loaded", "time": 110.0, "bytes": 4096},
        {"boot": "b", "event": "serving", "time": 110.0},
    ]
    [timeline] = timelines(lines, (), lambda _: False, NOW)
    first, second = waterfalls([("one", timeline), ("two", timeline)])
    assert first.startswith('<details open=""><summary>one · 10.0 s</summary>')
    assert second.startswith("<details><summary>two · 10.0 s</summary>")
    assert re.findall(
        r'class="bar ?(\w*)" style="margin-left:([\d.]+)%;width:([\d.]+)%"', first
    ) == [
        ("own", "0.00", "10.00"),
        ("own", "10.00", "30.00"),
        ("", "40.00", "20.00"),
        ("", "60.00", "40.00"),
    ]
    assert re.findall(r"<span>([^<]*)</span>", first)[-2:] == ["weights", "4.00 s, 4.0 KiB"]
    told = Told({}, {}, {}, [BOOTED._replace(timeline=timeline)])
    assert "<summary>of · 10 s ago · 10.0 s</summary>" in page(
        "vm", sight([], [], told=told), [], NOW
    )


@pytest.mark.parametrize(
    ("one", "running", "expected"),
    [
        (RUNS, [RUNS], "runs here"),
        (seen("x"), [], "nothing runs here from a checkpoint"),
        (seen("x", made_for=None), [RUNS], ""),
        (seen("x", 2.0), [RUNS], "newer than runs, which runs: another save of the same"),
        (
            seen("x", 0.5, made_for=make_key(vllm="0.31.0")),
            [RUNS],
            "older than runs, which runs: vllm 0.31.0 instead of 0.32.0",
        ),
        (
            seen("x", 2.0, made_for=make_key(model="y", tp=4)),
            [RUNS],
            "newer than runs, which runs: other content of the model, tp 4 instead of 2",
        ),
        (
            seen("x", 2.0, source="other", made_for=make_key(model="y")),
            [RUNS],
            "newer than runs, which runs: of other",
        ),
        (
            seen("x", 2.0, made_for=make_key(tp=4)),
            [RUNS, seen("near", running=True, made_for=make_key(tp=4, vllm="0.31.0"))],
            "newer than runs, which runs: tp 4 instead of 2",
        ),
    ],
)
def test_a_checkpoint_is_compared_with_the_nearest_that_runs(
    one: Seen, running: list[Seen], expected: str
) -> None:
    assert differs(one, running) == expected


def test_what_lies_in_both_stores_is_one_row_and_the_newest_is_the_first() -> None:
    both, there = seen("both", 2.0), seen("there", 3.0)
    odd = Seen("odd", UNREADABLE, "why")
    found = rows([both, RUNS, odd], [both._replace(name="another name"), there, odd])
    assert [(row.one.name, bool(row.here), bool(row.there)) for row in found] == [
        ("there", False, True),
        ("both", True, True),
        ("runs", True, False),
        ("odd", True, True),
    ]


def test_what_lies_twice_in_one_store_is_two_rows() -> None:
    proved = RUNS._replace(name="runs-g2", proved=True, sealed=True)
    found = rows([RUNS], [proved, RUNS])
    assert [(row.one.name, row.here, row.there) for row in found] == [
        ("runs", RUNS, proved),
        ("runs", None, RUNS),
    ]


def test_what_needs_a_look_is_said_first_and_only_then() -> None:
    fine = told_by(page("h", sight([RUNS], [RUNS]), [], NOW))
    assert "Needs a look" not in fine
    look, job = Job("look", 60.0, list), Job("prefetch", 60.0, list)
    look.record = Record(runs=4, succeeded=NOW - 45)
    job.record = Record(runs=3, failures=2, succeeded=NOW - 7200, error="no room")
    torn = sight([RUNS, seen("torn", state=DAMAGED, text="a.safetensors: wrong")], [])
    torn.stores["shared"] = StoreView("/shared", error="gone away")
    said = told_by(page("h", torn, [look, job], NOW))
    for text in (
        "shared store: gone away",
        "local store: torn is damaged: a.safetensors: wrong",
        "job prefetch: no room",
        "last look: 45 s ago",
        "2 h ago",
        "2 of 3",
    ):
        assert text in said


def test_a_boot_is_shown_with_its_phase_tier_and_outcome_and_a_refusal_with_what_to_do() -> None:
    status = Status(boot="b1", tier="shared", checkpoint="of-1", reason="local.hit")
    report = Report(status, Standing("serving", "on http://*:8000", is_healthy=True))
    latest = (
        Booted("b1", NOW - 90, "tiny-tp2", "shared", "healthy", "local.hit", is_refused=False),
    )
    told = Told({}, {}, {"space.short": 3}, latest)
    made = page("h", sight([], [], boots=(report,), told=told), [], NOW)
    assert '<strong class="good">serving</strong>' in made
    said = told_by(made)
    assert "of-1 · tier shared · local.hit · boot b1" in said
    assert re.search(r"tiny-tp2\n2 min ago\nshared\nhealthy\nlocal.hit", re.sub(r"\n+", "\n", said))
    assert f"space.short\n3\n{remedy('space.short')}" in re.sub(r"\n+", "\n", said)


def test_a_node_where_nothing_was_yet_has_a_page() -> None:
    said = told_by(page("h", Sight(), [], NOW))
    for text in ("No boot has left a status here.", "No store was seen.", "None."):
        assert text in said


def test_an_unknown_reason_is_looked_up() -> None:
    assert remedy("of.tomorrow") == UNKNOWN
    assert UNKNOWN not in REMEDIES.values()
