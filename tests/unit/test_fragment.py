from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import TENSORS, make_key, shards

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint import index, manifest
from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.fragment import Fragment
from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.errors import SaveError

KEY = make_key(tp=2)
SOURCE = Source(name="org/tiny", revision=None, identity={"blake3": KEY.model})
CONFIG = FileEntry(path="config.json", size=2, blake3=digest_bytes(b"{}"), role="model")


def rank(number: int) -> Fragment:
    return shards(KEY, number, 2, TENSORS, seed=0)[0]


def assembled(found: list[Fragment]) -> tuple[Manifest, bytes]:
    return fragments.assemble(found, [CONFIG], KEY, SOURCE, {}, "2026-01-01T00:00:00Z")


@pytest.mark.parametrize("number", [0, 1])
def test_a_fragment_comes_back_from_its_bytes(number: int) -> None:
    fragment = rank(number)
    assert fragments.decode(fragment.encode()) == fragment


def test_a_fragment_is_hidden_so_that_it_is_never_part_of_a_checkpoint() -> None:
    assert fragments.fragment_name(3) == ".rank-3.json"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fragments_of_all_ranks_become_a_manifest_that_schema_1_allows(
    order: tuple[int, int],
) -> None:
    made, index_bytes = assembled([rank(number) for number in order])
    assert manifest.decode(made.encode()) == made
    assert made.name.startswith("tiny-tp2-bf16-")
    assert made.decisions == {"tied": False}
    [entry] = [entry for entry in made.files if entry.role == "index"]
    assert (entry.size, entry.blake3) == (len(index_bytes), digest_bytes(index_bytes))
    assert len(index.decode(index_bytes)) == 2 * len(TENSORS)
    assert CONFIG in made.files


@pytest.mark.parametrize("ranks", [[], [0], [1], [0, 0], [0, 1, 1]])
def test_a_missing_or_doubled_rank_is_refused_by_number(ranks: list[int]) -> None:
    with pytest.raises(SaveError, match=r"expected \[0, 1\]"):
        assembled([rank(number) for number in ranks])


def test_ranks_that_decided_differently_are_refused() -> None:
    with pytest.raises(SaveError, match="differently"):
        assembled([rank(0), replace(rank(1), decisions={"tied": True})])


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b"\xff", b'{"rank": 0}', b'{"rank": "x"}', rank(0).encode()[:-20]),
        *(b'{"rank": Infinity}', b"[" * 100_000),
    ],
)
def test_what_is_no_fragment_is_a_failed_save(data: bytes) -> None:
    with pytest.raises(SaveError, match="fragment"):
        fragments.decode(data)
