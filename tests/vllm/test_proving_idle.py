"""A sidecar has real vLLM prove what nobody proved; from then on it is served, and elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from processes import Program, run
from serving import FLAGS, environment, events

from entrypoint.checkpoint.inspect import read_manifest
from entrypoint.state.proofs import Proofs

pytestmark = pytest.mark.vllm

SECONDS = 300.0
PROGRAM = str(Path(sys.executable).with_name("shardboot"))


def test_what_came_without_its_proof_is_proved_while_nothing_runs_and_published_with_it(
    tmp_path: Path,
) -> None:
    model, log, shared = tmp_path / "model", tmp_path / "sidecar.log", tmp_path / "shared"
    make_model("int8", model)
    shared.mkdir()
    environ = environment() | {
        "SHARDBOOT_LOCAL_DIR": str(tmp_path / "checkpoints"),
        "SHARDBOOT_STATE_DIR": str(tmp_path / "state"),
    }
    elsewhere = {
        "SHARDBOOT_LOCAL_DIR": str(tmp_path / "checkpoints elsewhere"),
        "SHARDBOOT_STATE_DIR": str(tmp_path / "state elsewhere"),
        "SHARDBOOT_SHARED": str(shared),
    }
    words = (str(model), *FLAGS)

    def shardboot(command: str, *options: str, **settings: str) -> Any:
        line = [PROGRAM, command, "--format", "json", *options, *words]
        status, said = run(line, environ | settings, tmp_path / f"{command}.log")
        assert status == 0, (tmp_path / f"{command}.log").read_text()
        return json.loads(said)

    saved = shardboot("save", "--prove", "never")
    assert shardboot("plan")["reason"] == "local.unproved"
    options = ["--watch-interval", "1s", "--scrub-interval", "never", "--listen", "127.0.0.1:0"]
    options += ["--shared", str(shared), "--publish"]
    with Program([PROGRAM, "sidecar", *options], environ, log):
        deadline = time.monotonic() + SECONDS
        while "push.done" not in [event["event"] for event in events(log)]:
            said = log.read_text()
            assert time.monotonic() < deadline, said
            assert "failed" not in said, said
            time.sleep(0.2)
    planned = shardboot("plan")
    assert (planned["action"], planned["reason"]) == ("reuse", "local.hit")
    manifest = read_manifest(Path(saved["checkpoint"]["path"]))
    proof = Proofs(tmp_path / "state").find(manifest)
    assert proof is not None
    planned = shardboot("plan", **elsewhere)
    assert (planned["action"], planned["reason"]) == ("copy", "shared.hit")
    pulled = shardboot("pull", **elsewhere)
    copied = read_manifest(Path(pulled["checkpoint"]["path"]))
    assert copied == manifest._replace(proof=proof)
    print(f"{proof['items']} items equal")
