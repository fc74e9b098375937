"""`wait` and `health` beside real vLLM, which answers where a file and words put it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from processes import Program, run
from serving import FLAGS, environment, free_port

from entrypoint.state.ledger import Ledger

pytestmark = pytest.mark.vllm

IN_ORDER = ("deciding", "saving", "starting", "loading", "loaded", "serving")

SHARDBOOT = str(Path(sys.executable).with_name("shardboot"))


class Unit:
    """A server over TLS, its port and certificate in a file that its words name."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.model, self.file = room / "model", room / "serve.yaml"
        make_model("dense", self.model)
        self.certificate(room / "own")
        self.port = free_port()
        self.file.write_text(
            f"port: {self.port}\nhost: 127.0.0.1\n"
            f"ssl-certfile: {room / 'own.pem'}\nssl-keyfile: {room / 'own.key'}\n"
        )
        self.environ: Mapping[str, str] = environment() | {
            "SHARDBOOT_LOCAL_DIR": str(room / "checkpoints"),
            "SHARDBOOT_STATE_DIR": str(room / "state"),
        }

    def certificate(self, place: Path) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm"]
        command += ["-keyout", f"{place}.key", "-out", f"{place}.pem"]
        subprocess.run(command, check=True, capture_output=True)

    def serve(self, *words: str) -> Program:
        command = [SHARDBOOT, "serve", str(self.model), *FLAGS, "--config", str(self.file), *words]
        return Program(command, self.environ, self.room / "serve.log")

    def ask(self, *words: str) -> tuple[int, str]:
        return run([SHARDBOOT, *words], self.environ, self.room / "ask.log")

    def health(self) -> tuple[int, Any]:
        status, said = self.ask("health", "--format", "json")
        return status, json.loads(said)


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Unit:
    return Unit(tmp_path_factory.mktemp("unit"))


def phases(said: str) -> list[str]:
    """Return what `wait` went through; what lasts less than a look may be missing."""
    told = [line.partition(":")[0] for line in said.splitlines()]
    return [phase for phase, _ in groupby(told) if phase != "unknown"]


def events(unit: Unit) -> Sequence[str]:
    entries = Ledger(unit.room / "state").entries()
    # How long vLLM's own steps took is nobody's business here.
    return [str(entry["event"]) for entry in entries if entry["event"] != "phase"]


def test_a_boot_is_watched_from_its_start_until_vllm_serves(unit: Unit) -> None:
    with unit.serve() as server:
        status, said = unit.ask("wait", "--timeout", "10min")
        assert status == 0, said + server.last_lines()
        seen = phases(said)
        assert {"saving", "serving"} <= set(seen)
        assert seen == [phase for phase in IN_ORDER if phase in seen]
        assert said.endswith(f"serving: saved on https://127.0.0.1:{unit.port}\n")
        status, found = unit.health()
        assert (status, found["phase"], found["pid"]) == (0, "serving", server.process.pid)
    assert events(unit) == [
        *("source-loaded", "save.done"),
        *("attempt", "loading", "loaded", "serving", "healthy"),
    ]
    status, found = unit.health()
    assert (status, found["phase"]) == (1, "stopped")


def test_a_server_that_wants_client_certificates_is_known_to_serve(unit: Unit) -> None:
    unit.certificate(unit.room / "other")
    mutual = ("--ssl-cert-reqs", "2", "--ssl-ca-certs", str(unit.room / "other.pem"))
    with unit.serve(*mutual) as server:
        status, said = unit.ask("wait", "--timeout", "10min")
        assert status == 0, said + server.last_lines()
        status, found = unit.health()
        assert (status, found["phase"]) == (0, "serving")
        assert "it wants a client certificate" in found["text"]
