"""Which ranks run on a node, as vLLM's own executor numbers them, and how they are said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.checkpoint.layout import Layout
from entrypoint.vllm_plugin.resolved_key import ranks_here


def parallel(tp: int, pp: int = 1, nnodes: int = 1, node: int = 0, **changes: Any) -> Any:
    """Return what a `ParallelConfig` says of one replica over nodes, with `changes`."""
    facts = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "world_size": tp * pp,
        "nnodes": nnodes,
        "local_world_size": tp * pp // nnodes,
        "node_rank_within_dp": node,
    }
    return SimpleNamespace(**facts | changes)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        (parallel(2), [0, 1]),
        (parallel(2, distributed_executor_backend="ray"), [0, 1]),
        (parallel(2, data_parallel_size=4), [0, 1]),
        (SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1), [0]),
        (parallel(2, nnodes=2, node=0), [0]),
        (parallel(2, nnodes=2, node=1), [1]),
        (parallel(8, nnodes=2, node=1), [4, 5, 6, 7]),
        (parallel(2, 2, nnodes=2, node=0), [0, 1]),
        (parallel(2, 2, nnodes=2, node=1), [2, 3]),
        (parallel(2, 2, nnodes=4, node=3), [3]),
    ],
)
def test_a_node_has_the_ranks_of_its_place(found: Any, ranks: list[int]) -> None:
    assert ranks_here(found) == (ranks, "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"distributed_executor_backend": None}, "None"),
        ({"world_size": 8}, "context parallelism"),
        ({"local_world_size": 4}, "does not tell"),
        ({"local_world_size": None}, "does not tell"),
        ({"node_rank_within_dp": None}, "does not tell"),
    ],
)
def test_where_that_is_not_known_it_says_why(changes: dict[str, Any], says: str) -> None:
    ranks, why = ranks_here(parallel(4, nnodes=2, node=1, **changes))
    assert ranks == []
    assert says in why


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([1], "rank 1 of 8"),
        ([2, 3], "ranks 2-3 of 8"),
        ({7, 0, 1, 5}, "ranks 0-1, 5, 7 of 8"),
        ([], "ranks none of 8"),
    ],
)
def test_ranks_are_said_as_people_say_them(ranks: list[int], said: str) -> None:
    assert Layout(tp=4, pp=2).in_words(ranks) == said
