"""Workers of several nodes find out whether all of them load a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import free_port

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CHILD = Path(__file__).with_name("meeting_child.py")
LONG, SHORT = 60.0, 0.3


class Worker:
    """A process with a rank, told by lines when to come."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), str(world), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def come(self, seconds: float) -> None:
        assert self.process.stdin is not None
        print(seconds, file=self.process.stdin, flush=True)

    @property
    def hears(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    port = free_port()
    made = [Worker(rank, 2, port) for rank in range(2)]
    yield made
    for worker in made:
        worker.process.communicate()


def test_where_all_come_all_hear_so(workers: list[Worker]) -> None:
    for worker in workers:
        worker.come(LONG)
    assert [worker.hears for worker in workers] == [True, True]


def test_where_one_stays_away_the_others_hear_so_and_it_too_if_it_comes_late(
    workers: list[Worker],
) -> None:
    first, late = workers
    first.come(SHORT)
    assert first.hears is False
    late.come(LONG)
    assert late.hears is False
    for worker in workers:
        worker.come(LONG)
    assert [worker.hears for worker in workers] == [True, True]


def config(node: int) -> Any:
    parallel = SimpleNamespace(nnodes=2, local_world_size=4, node_rank_within_dp=node)
    return SimpleNamespace(parallel_config=parallel, compilation_config=SimpleNamespace())


def test_the_lowest_rank_of_each_node_keeps_its_notes() -> None:
    from entrypoint.vllm_plugin import compat

    alone = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=1))
    found = [compat.first_rank_here(each) for each in (config(0), config(1), alone)]
    assert found == [0, 4, 0]
    assert [compat.spans_nodes(each) for each in (config(0), alone)] == [True, False]


def test_where_another_node_loads_no_checkpoint_this_one_does_not_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm.config")
    import torch
    from vllm.config.load import LoadConfig

    from entrypoint.vllm_plugin import compat
    from entrypoint.vllm_plugin.load_format import ShardbootLoader

    monkeypatch.setattr(compat, "all_come", lambda _: False)
    # As vLLM's workers have it on a CPU.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(compat, "tp_pp_rank", lambda: (8, 1, 4))
    settings = {"manifest": "x", "boot": "b", "state": str(tmp_path)}
    loader = ShardbootLoader(LoadConfig(model_loader_extra_config=settings))
    text = SimpleNamespace(tie_word_embeddings=False)
    hf_config = SimpleNamespace(tie_word_embeddings=False, get_text_config=lambda: text)
    model = SimpleNamespace(hf_config=hf_config, runner_type="generate", model=str(tmp_path))
    with pytest.raises(DamagedError, match="workers of another node load no checkpoint"):
        loader.load_model(config(1), model)
    noted = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [note["event"] for note in noted] == ["objection"]


def test_other_weights_on_another_node_are_an_objection_and_another_save_of_the_same_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm.config")
    from checkpoints import make_checkpoint

    from entrypoint.vllm_plugin import compat
    from entrypoint.vllm_plugin.agreement import Objection, same_everywhere

    one, other = (make_checkpoint(tmp_path, seed=seed) for seed in (0, 1))

    def elsewhere(manifest: Manifest) -> None:
        there = ("there", manifest.state)
        monkeypatch.setattr(compat, "gather", lambda value: [value, there])

    later = one.renamed("there")._replace(created_at="2026-02-02T00:00:00Z", save={"host": "b"})
    assert later.content != one.content
    elsewhere(later)
    same_everywhere(one)
    elsewhere(other)
    with pytest.raises(Objection, match=f"worker 1 has there and worker 0 {one.name}") as caught:
        same_everywhere(one)
    assert not caught.value.fault
