"""`shardboot tune` on real vLLM: real saves and real loads, in the workers of one executor."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from models import make_model
from processes import run
from serving import FLAGS, environment

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.mark.parametrize(("kind", "tp"), [("dense", 2), ("tied", 1), ("awq", 1)])
def test_every_size_is_saved_and_loaded_by_all_ranks(tmp_path: Path, kind: str, tp: int) -> None:
    model, store, log = tmp_path / "model", tmp_path / "checkpoints", tmp_path / "log"
    make_model(kind, model)
    environ = environment(tp) | {
        "SHARDBOOT_LOCAL_DIR": str(store),
        "SHARDBOOT_STATE_DIR": str(tmp_path / "state"),
        "SHARDBOOT_RESERVE_BYTES": "0",
    }
    ours = ("--format", "json", "--sizes", "512KiB,1MiB,1GiB,8GiB", "--runs", "2")
    binary = str(Path(sys.executable).with_name("shardboot"))
    status, said = run([binary, "tune", *ours, str(model), *FLAGS, "-tp", str(tp)], environ, log)
    assert status == 0, log.read_text()
    found = json.loads(said)
    # 8GiB would make the files that 1GiB makes.
    assert [each["size_per_file"] for each in found["sizes"]] == ["512KiB", "1MiB", "1GiB"]
    files = [each["files_per_rank"] for each in found["sizes"]]
    assert files[0] >= files[1] > files[2] == 1
    for each in found["sizes"]:
        assert len(each["warm_seconds"]) == 2
        assert all(0 < seconds < 60 for seconds in each["warm_seconds"])
    (name,) = {path.name for path in store.iterdir()}
    assert name == ".staging"
    assert not [*(store / name).iterdir()]
    shutil.rmtree(tmp_path)
