"""Servers that stay, and what their boots have left, for tests of who watches them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blackbox.harness import House

from entrypoint.state.ledger import Ledger

STAYS = {"stay": True}
ANSWERS = {"answers": 200}


@contextmanager
def serving(house: House, *words: object, **rules: object) -> Iterator[subprocess.Popen[str]]:
    """Boot a server that stays; when the block ends, so does the server."""
    house.rules(serve=rules or ANSWERS)
    process = house.start("serve", house.model, "-tp", 2, *words)
    house.wait_for("staying" if rules.get("stay") else "listening")
    yield process
    house.finish(process)


def health(house: House, *words: object, **more: object) -> tuple[int, Any]:
    found = house.run("health", "--format", "json", *words, **more)
    assert found.stderr == ""
    return found.status, json.loads(found.stdout)


def note(house: House, event: str, **fields: Any) -> None:
    """Note something in the latest boot's name, as the plugin does inside vLLM."""
    about = {"boot": house.attempts[-1]["boot"], "event": event, "time": round(time.time(), 3)}
    Ledger(house.state).append(about | fields)


def files(house: House) -> list[Path]:
    """Return what boots have left, oldest first; their names tell seconds alone."""
    found = (house.state / "status").iterdir()
    return sorted(found, key=lambda path: float(json.loads(path.read_text())["started"]))


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
