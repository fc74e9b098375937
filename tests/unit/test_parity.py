"""What scripts/gpu-parity says of what ran, and of what did not."""

from __future__ import annotations

import re

import pytest
from parity import ALL_KINDS, Cell, Outcome, impossible, outcome, table, verdict

PROVED = Outcome("proved", "12 items")
FAILED = Outcome("failed", "save.unproven: tokens differ")
NOT_RUN = Outcome("not run", "1 GPU for 2 ranks")
PROOF = {"items": 12, "unprobed": []}
ERROR = "shardboot: error: "


@pytest.mark.parametrize(
    ("status", "log", "proof", "expected"),
    [
        (0, "", PROOF, PROVED),
        (0, "", PROOF | {"unprobed": ["a", "b"]}, Outcome("proved", "12 items, not 2")),
        (0, "", None, Outcome("failed", "the checkpoint came without a proof")),
        (51, f"vLLM's own\n{ERROR}save.unproven: tokens differ\n", None, FAILED),
        (50, f"{ERROR}save.rejected: no", None, Outcome("not run", "save.rejected: no")),
        (-9, "vLLM's own", None, Outcome("failed", "exit status -9, and no word why")),
        (50, f"{ERROR}save.failed: x", PROOF, Outcome("failed", "save.failed: x")),
    ],
)
def test_only_a_save_that_left_a_proof_proves(
    status: int, log: str, proof: dict[str, object] | None, expected: Outcome
) -> None:
    assert outcome(status, log, proof) == expected


@pytest.mark.parametrize(
    ("outcomes", "status", "says"),
    [
        ([PROVED, PROVED], 0, "all 2 that ran are proved"),
        ([PROVED, NOT_RUN], 0, "all 1 that ran are proved; 1 not run, of which nothing is known"),
        ([PROVED, FAILED], 1, "1 of 2 failed"),
        ([FAILED, NOT_RUN], 1, "1 of 1 failed; 1 not run"),
        ([NOT_RUN, NOT_RUN], 77, "nothing was run, nothing is known"),
        ([], 77, "nothing was run, nothing is known"),
    ],
)
def test_nothing_is_claimed_of_what_did_not_run(
    outcomes: list[Outcome], status: int, says: str
) -> None:
    found = verdict(outcomes)
    assert found[0] == status
    assert found[1].startswith(says)


def test_the_table_has_a_line_a_kind_and_a_column_a_size() -> None:
    outcomes = {Cell("dense", 1): PROVED, Cell("moe-ep", 2): NOT_RUN, Cell("dense", 2): FAILED}
    assert table(outcomes).splitlines() == [
        "| kind | TP=1 | TP=2 |",
        "| --- | --- | --- |",
        "| dense | proved: 12 items | failed: save.unproven: tokens differ |",
        "| moe-ep | - | not run: 1 GPU for 2 ranks |",
    ]


def test_no_word_of_a_failure_breaks_the_table() -> None:
    line = table({Cell("dense", 1): Outcome("failed", "a | b" * 100)}).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert len(line) < 300


def test_a_machine_tries_what_it_has_the_gpus_for() -> None:
    assert not impossible(Cell("dense", 1), gpus=1, on_cpu=False)
    assert impossible(Cell("dense", 2), gpus=1, on_cpu=False) == "1 GPU for 2 ranks"
    assert not impossible(Cell("fp8", 2), gpus=2, on_cpu=False)
    assert not impossible(Cell("dense", 2), gpus=0, on_cpu=True)
    assert "FP8" in impossible(Cell("fp8-block", 1), gpus=0, on_cpu=True)


def test_every_kind_of_the_docs_is_tried_and_fp8_too() -> None:
    assert {"dense", "moe-ep", "awq", "mla", "fp8", "fp8-block", "fp8-channel"} <= set(ALL_KINDS)
