"""What a hit may import: every module that it does not need delays every boot."""

from __future__ import annotations

import subprocess
import sys

HIT = "import entrypoint.cli, entrypoint.boot, entrypoint.launch"
HEAVY = (
    "click",
    "dataclasses",
    "inspect",
    "obstore",
    "requests",
    "subprocess",
    "tempfile",
    "torch",
)


def test_a_hit_imports_neither_a_parser_nor_what_only_a_copy_or_a_save_needs() -> None:
    program = f"import sys; {HIT}; print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert found.stdout.split() == []
