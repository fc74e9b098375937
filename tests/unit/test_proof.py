"""When evidence proves, when a control excuses, and when nothing does."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.proof import Item, compare, only_recomputed, read, summary
from entrypoint.errors import ProofError


def item(digest: str, *sketch: float, recomputed: bool = False, unprobed: str = "") -> Item:
    return Item(digest, sketch, is_recomputed=recomputed, unprobed=unprobed)


SOURCE = {"a": item("1", 1.0, 2.0), "b": item("2", 0.5)}


def test_equal_digests_prove() -> None:
    verdict = compare(SOURCE, dict(SOURCE))
    assert verdict.proves
    assert verdict.discrepancies == ()


def test_what_hangs_loose_is_there_on_both_sides_and_its_bytes_count_without_answers() -> None:
    def side(digest: str, dtype: str = "F32") -> Item:
        tensor: Json = {"digest": digest, "dtype": dtype, "shape": [2], "kind": "loose"}
        rank: Json = {"rank": 0, "before": {"t": tensor}, "after": {}}
        (made,) = read([json.dumps(rank).encode()], b"{}").values()
        return made

    answer = {"answer 0 tokens": item("7")}
    assert not compare({"t": side("1")}, {"t": side("2")}).proves
    assert compare(answer | {"t": side("1")}, answer | {"t": side("2")}).proves
    assert not compare(answer | {"t": side("1")}, answer | {"t": side("1", "F16")}).proves
    assert compare(answer, answer | {"t": side("1")}).discrepancies == ("t: only the checkpoint",)


def test_one_other_digest_does_not_prove_and_asks_for_a_control() -> None:
    verdict = compare(SOURCE, SOURCE | {"a": item("9", 1.0, 2.25)})
    assert not verdict.proves
    assert verdict.excusable
    assert verdict.discrepancies == ("a: differs by 0.25",)


@pytest.mark.parametrize(
    ("found", "control", "proves"),
    [
        pytest.param(item("9", 1.1), item("8", 1.1), True, id="as far off as the control"),
        pytest.param(item("9", 1.3), item("8", 1.1), False, id="further off than twice that"),
        pytest.param(item("9", 1.0), item("1", 1.0), False, id="the control was stable"),
        pytest.param(item("9"), item("8"), False, id="nothing to measure by"),
        pytest.param(item("9", float("nan")), item("8", 5.0), False, id="not a number"),
        pytest.param(
            item("9", 1.0 + 1 / 256, recomputed=True),
            item("8", 1.0, recomputed=True),
            True,
            id="a recomputed table by one step",
        ),
        pytest.param(
            item("9", 1.1, recomputed=True),
            item("8", 1.0, recomputed=True),
            False,
            id="a recomputed table by more",
        ),
    ],
)
def test_a_control_excuses_what_the_source_cannot_reproduce_itself(
    found: Item, control: Item, *, proves: bool
) -> None:
    source = {"t": item("1", 1.0, recomputed=found.is_recomputed)}
    assert compare(source, {"t": found}, {"t": control}).proves is proves


def test_a_control_is_asked_for_once() -> None:
    found = SOURCE | {"a": item("9", 9.0)}
    assert not compare(SOURCE, found, dict(SOURCE)).excusable


@pytest.mark.parametrize(
    ("found", "so"),
    [
        pytest.param({"t": item("9", 1.5, recomputed=True)}, True, id="a recomputed table"),
        pytest.param({"t": item("1", 1.0, recomputed=True)}, True, id="nothing"),
        pytest.param({"t": item("9", 1.5)}, False, id="it is stored on one side"),
        pytest.param({}, False, id="one missing"),
    ],
)
def test_tables_that_every_process_recomputes_are_told_from_weights(
    found: dict[str, Item], *, so: bool
) -> None:
    weights = {"w": item("2", 2.0)}
    source = {"t": item("1", 1.0, recomputed=True)}
    assert only_recomputed(source | weights, found | weights) is so
    assert not only_recomputed(source | weights, found | {"w": item("3", 2.0)})


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({"a": SOURCE["a"]}, id="one missing"),
        pytest.param(SOURCE | {"c": item("3")}, id="one extra"),
        pytest.param(SOURCE | {"b": item("", unprobed="why")}, id="probed on one side only"),
    ],
)
def test_what_only_one_side_has_is_never_excused(found: Mapping[str, Item]) -> None:
    verdict = compare(SOURCE, found)
    assert not verdict.proves
    assert not verdict.excusable


def test_what_neither_side_could_probe_is_listed_and_not_counted() -> None:
    source = SOURCE | {"c": item("", unprobed="no such kernel")}
    assert compare(source, dict(source)).proves
    kept = summary(source, controlled=False, vllm="0", plugin="1")
    assert kept["items"] == 2
    assert kept["unprobed"] == ["c"]


def files(tokens: list[int], digest: str = "d") -> tuple[list[bytes], bytes]:
    entry: dict[str, Json] = {"digest": digest, "dtype": "F32", "shape": [1], "sketch": [1.5]}
    rank = {"rank": 0, "before": {"w": entry}, "after": {"m": {"unprobed": "x"}}}
    answer = {"prompt": [1], "tokens": tokens, "logprobs": [-0.5]}
    return [json.dumps(rank).encode()], json.dumps({"answers": [answer]}).encode()


def test_recorded_files_give_an_item_for_everything() -> None:
    items = read(*files([1, 2]))
    assert list(items) == [
        "rank 0 before w",
        "rank 0 after m",
        "answer 0 tokens",
        "answer 0 logprobs",
    ]
    assert compare(items, read(*files([1, 2]))).proves
    assert not compare(items, read(*files([1, 3]))).proves
    assert not compare(items, read(*files([1, 2], digest="e"))).proves


def test_an_engine_that_cannot_be_asked_is_said_in_the_proof() -> None:
    ranks, _ = files([])
    items = read(ranks, json.dumps({"answers": [], "unanswered": "pipeline on a CPU"}).encode())
    kept = summary(items, controlled=False, vllm="0", plugin="1")
    assert kept["unprobed"] == ["rank 0 after m", "answers"]


ENDLESS = b'{"rank": 0, "before": {"w": {"sketch": [1' + b"0" * 400 + b"]}}}"


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"rank": 0, "before": 3, "after": {}}', b"[" * 100_000, ENDLESS],
    ids=lambda data: repr(data[:12]),
)
def test_odd_evidence_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(ProofError):
        read([data], b"{}")
