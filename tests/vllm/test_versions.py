"""Checkpoints of every supported vLLM, each in an environment of its own.

`save --prove always` saves with one process and loads with another: parameters, probes, tokens and
logprobs must equal the source's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from serving import FLAGS, environment

from entrypoint.checkpoint.inspect import read_manifest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "0.27.0"
OTHERS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0")
KINDS = ("dense", "moe")
KEEP = "SHARDBOOT_TESTS_KEEP_VLLM"
"""With it, the environments of the long tests stay, at 4 GB each."""


@pytest.fixture(
    scope="module",
    params=[OLDEST, *(pytest.param(version, marks=pytest.mark.long) for version in OTHERS)],
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    version: str = request.param
    place = ROOT / f".venv-{version}"
    made = subprocess.run(
        [ROOT / "scripts" / "setup", "--vllm", version],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    yield version, place / "bin" / "vllm"
    if version != OLDEST and KEEP not in os.environ:
        shutil.rmtree(place)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_every_vllm_is_proved_and_then_a_hit(
    kind: str, engine: tuple[str, Path], tmp_path: Path
) -> None:
    version, vllm = engine
    make_model(kind, tmp_path / kind)
    told = {
        "SHARDBOOT_VLLM": str(vllm),
        "SHARDBOOT_LOCAL_DIR": str(tmp_path / "checkpoints"),
        "SHARDBOOT_STATE_DIR": str(tmp_path / "state"),
        "SHARDBOOT_PROVE": "always",
    }
    words = [str(tmp_path / kind), "-tp", "2", *FLAGS]
    started = time.monotonic()
    shardboot("save", words, told)
    seconds = time.monotonic() - started

    decided = shardboot("plan", words, told)
    assert (decided["action"], decided["reason"]) == ("reuse", "local.hit")
    manifest = read_manifest(Path(decided["checkpoint"]["path"]))
    assert manifest.key.vllm == f"{version}+cpu"
    assert manifest.proof is not None
    proof = f"{manifest.proof['items']} items equal" + (
        ", as far as the source repeats itself" if manifest.proof["controlled"] else ""
    )
    print(f"\n| {version} | {kind} | {proof} | {seconds:.0f} s |")


def shardboot(command: str, words: list[str], told: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        ["shardboot", command, "--format", "json", *words],
        env=environment(tp=2) | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
