from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint import index
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.errors import ManifestError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
entries = st.builds(
    TensorEntry,
    name=texts,
    rank=st.integers(0, 15),
    file=texts,
    dtype=texts,
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    begin=st.integers(0, 2**48),
    end=st.integers(0, 2**48),
)


def by_name_and_rank(entry: TensorEntry) -> tuple[str, int]:
    return entry.name, entry.rank


@given(st.lists(entries, max_size=8, unique_by=by_name_and_rank))
def test_tensors_come_back_from_the_index_by_name_and_rank(tensors: list[TensorEntry]) -> None:
    encoded = index.encode(tensors)
    assert list(index.decode(encoded)) == sorted(tensors, key=by_name_and_rank)
    assert index.encode(reversed(tensors)) == encoded


def test_a_file_knows_its_tensors() -> None:
    tensors = [TensorEntry("a", rank, f"f{rank}", "I8", (1,), 0, 1) for rank in (0, 1)]
    grouped = index.by_file([*tensors, TensorEntry("b", 0, "f0", "I8", (), 1, 2)])
    assert {file: sorted(held) for file, held in grouped.items()} == {"f0": ["a", "b"], "f1": ["a"]}


ENTRY = {"rank": 0, "file": "f", "dtype": "I8", "shape": [1], "bytes": [0, 1]}


@pytest.mark.parametrize(
    "document",
    [
        *([], None, 3, {}, {"tensors": []}, {"tensors": {"a": [3]}}),
        *({"tensors": {"a": [{k: v for k, v in ENTRY.items() if k != name}]}} for name in ENTRY),
        {"tensors": {"a": [ENTRY | {"bytes": [0]}]}},
        {"tensors": {"a": [ENTRY | {"bytes": None}]}},
        {"tensors": {"a": [ENTRY | {"shape": 3}]}},
        {"tensors": {"a": [ENTRY | {"shape": ["x"]}]}},
        {"tensors": {"a": [ENTRY | {"rank": None}]}},
        {"tensors": {"a": [ENTRY | {"rank": float("nan")}]}},
        {"tensors": {"a": [ENTRY | {"rank": float("inf")}]}},
    ],
    ids=lambda document: json.dumps(document)[:50],
)
def test_what_is_no_index_is_refused(document: object) -> None:
    with pytest.raises(ManifestError, match=r"index\.json"):
        index.decode(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 50_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        index.decode(data)


def test_an_index_cut_anywhere_is_refused() -> None:
    data = index.encode([TensorEntry("a", 0, "f", "I8", (1,), 0, 1)]).rstrip()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            index.decode(data[:length])
