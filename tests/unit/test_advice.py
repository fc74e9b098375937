"""After how many boots a checkpoint pays, and what is said where that is not known."""

from __future__ import annotations

from typing import Any

import pytest

from entrypoint.insight.advice import Figures, advise, table

KNOWN = Figures(
    "f", "llama-tp2-bf16", 3, (3,), 90_000.0, source=10.0, load=4.0, step="save", paid=30.0
)


@pytest.mark.parametrize(
    ("changes", "word", "boot"),
    [
        ({}, "pays", 5),
        ({"paid": 30.1}, "pays", 6),
        ({"paid": 0.0}, "pays", 1),
        ({"step": "copy", "paid": 6.0}, "pays", 1),
        ({"step": "tee", "paid": 0.0}, "pays", 1),
        ({"step": "tee", "paid": 6.0}, "pays", 2),
        ({"load": 10.0}, "never", None),
        ({"load": 11.0}, "never", None),
        # Releases that are over tell how long the next one will be booted; the last goes on.
        ({"releases": (4, 1)}, "never", 5),
        ({"releases": (5, 1)}, "pays", 5),
        ({"releases": (2, 4, 1)}, "never", 5),
        ({"releases": (1, 9)}, "pays", 5),
        # Reading is the least that loading takes: the gain may be more, and never less.
        ({"at_least": True}, "pays", 5),
        ({"at_least": True, "releases": (1, 1)}, "pays", 5),
        ({"at_least": True, "load": 10.0}, "unknown", None),
        ({"source": None}, "unknown", None),
        ({"load": None}, "unknown", None),
        ({"paid": None}, "unknown", None),
    ],
)
def test_a_checkpoint_pays_once_it_has_saved_what_it_cost(
    changes: dict[str, Any], word: str, boot: int | None
) -> None:
    advice = advise(KNOWN._replace(**changes))
    assert (advice.word, advice.boot) == (word, boot)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"load": None}, "no boot has loaded one yet"),
        ({"load": None, "step": "", "paid": None}, "`shardboot save` makes one"),
        ({"source": None}, "--source-rate"),
        ({"paid": None}, "the next save or copy is timed"),
        ({"load": 12.0}, "no faster than the source"),
        ({"releases": (4, 2, 1)}, "only from boot 5, and a release is booted 3 times"),
        ({"at_least": True}, "pays from boot 5 at the latest"),
    ],
)
def test_what_is_missing_and_why_it_never_pays_is_said(changes: dict[str, Any], says: str) -> None:
    assert says in advise(KNOWN._replace(**changes)).text


def test_a_deployment_is_one_line_under_the_columns_names() -> None:
    other = Figures("g", "qwen-tp1-bf16-awq", 1, (), source=2.0, at_least=True)
    head, *lines = table([advise(KNOWN), advise(other)])
    assert head == "model and layout   source          checkpoint  made by       boots     releases"
    assert [line[: len(head)] for line in lines] == [
        "llama-tp2-bf16     10.0 s          4.0 s       save, 30.0 s  3 in 1 d  1       ",
        "qwen-tp1-bf16-awq  at least 2.0 s  ?           -             1         ?       ",
    ]
    assert [line[len(head) :].strip() for line in lines] == [
        "pays from boot 5",
        "not known: none was made yet; `shardboot save` makes one and times it",
    ]


def test_programs_get_every_figure() -> None:
    found = advise(KNOWN).to_json()
    assert found["verdict"] == "pays"
    assert (found["source_seconds"], found["load_seconds"]) == (10.0, 4.0)
    assert (found["step"], found["step_seconds"], found["pays_from_boot"]) == ("save", 30.0, 5)
