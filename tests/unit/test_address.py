"""Where vLLM will answer, by what it said and by the words that its answer leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.engine.address import address
from entrypoint.state.status import Address

TOLD: dict[str, Json] = {
    "host": "",
    "port": 8000,
    "takes_port": True,
    "uds": "",
    "certfile": "",
    "keyfile": "",
    "mutual": False,
    "headless": False,
}


@pytest.mark.parametrize(
    ("words", "told", "expected"),
    [
        ("", {}, {}),
        ("--port 9000", {}, {"port": 9000}),
        ("--port=9000 --host=::1", {}, {"port": 9000, "host": "::1"}),
        ("--port 9000 --port 9001", {}, {"port": 9001}),
        ("", {"port": 9000}, {"port": 9000}),
        ("--port 9001", {"port": 9000}, {"port": 9001}),
        ("--port", {"port": 9000}, {"port": 9000}),
        ("--port x", {"port": 9000}, {"port": 9000}),
        ("-- --port 9001", {}, {}),
        ("--ssl-keyfile /k --ssl-certfile /c", {}, {"keyfile": "/k", "certfile": "/c"}),
        ("--ssl_keyfile=/k_k", {}, {"keyfile": "/k_k"}),
        ("--ssl-cert-reqs 2", {}, {"mutual": True}),
        ("--ssl-cert-reqs=1", {}, {}),
        ("--ssl-cert-reqs 0", {"mutual": True}, {}),
        ("--uds /run/v", {}, {"uds": "/run/v"}),
        ("", {"headless": True}, {"headless": True}),
        ("--node-rank 1", {}, {}),
        # A supervisor of many replicas answers on a port of its own.
        ("--port 9001", {"port": 9256, "takes_port": False}, {"port": 9256}),
    ],
)
def test_words_win_over_what_vllm_said_without_them(
    words: str, told: dict[str, Json], expected: dict[str, Any]
) -> None:
    assert address(["m", *words.split()], TOLD | told) == Address(**expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--port 9000 --headless", {"port": 9000, "headless": True}),
        ("-- --headless", {}),
        ("--api-server-count 0", {"headless": True}),
        ("--nnodes 2 --node-rank 1", {"headless": True}),
        ("--node_rank=1", {"headless": True}),
        ("-r 3", {"headless": True}),
        ("--nnodes 2 --node-rank 0 --port 9000", {"port": 9000}),
        ("--node-rank 1 --node-rank 0", {}),
        ("--node-rank x", {}),
        ("--node-rank", {}),
        # Each replica's first node answers, and words alone do not tell which that is.
        ("--nnodes 2 --node-rank 1 -dp 2", {}),
        ("--nnodes 2 --node-rank 1 --data-parallel-size=1", {"headless": True}),
    ],
)
def test_a_vllm_that_could_not_be_asked_has_its_defaults(
    words: str, expected: dict[str, Any]
) -> None:
    assert address(["m", *words.split()], None) == Address(assumed=True, **expected)


def test_no_words_at_all_are_for_vllm_to_judge() -> None:
    assert address([], None) == Address(assumed=True)


def test_relative_paths_are_those_of_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = address(["--uds", "v", "--ssl-certfile", "c"], TOLD | {"keyfile": "k"})
    places = (found.uds, found.certfile, found.keyfile)
    assert places == tuple(str(tmp_path / name) for name in "vck")
