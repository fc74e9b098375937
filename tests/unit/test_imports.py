"""What is imported, and when: every module that a hit does not need delays every boot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import entrypoint

PACKAGE = Path(entrypoint.__file__).parent
HIT = "import entrypoint.cli, entrypoint.boot, entrypoint.launch"
HEAVY = (
    "click",
    "dataclasses",
    "difflib",
    "http",
    "inspect",
    "obstore",
    "prometheus_client",
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


@pytest.mark.parametrize("word", ["", "off"])
@pytest.mark.parametrize("command", ["serve", "enter"])
def test_words_that_are_all_vllms_are_not_parsed(tmp_path: Path, command: str, word: str) -> None:
    program = (
        f"import sys; sys.argv[1:] = [{command!r}, '/model', '-tp', '2']\n"
        "from entrypoint.cli import main\n"
        f"try: main()\nfinally: print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    )
    settings = {"VLLM": str(tmp_path / "none"), "STATE_DIR": str(tmp_path / "state")}
    environ = {f"SHARDBOOT_{name}": value for name, value in settings.items()}
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=os.environ | environ | {"SHARDBOOT": word},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 127, found.stderr
    assert found.stdout.split() == []


def test_health_imports_no_library_for_http(tmp_path: Path) -> None:
    libraries = ("asyncio", "http.client", "requests", "ssl", "subprocess", "urllib.request")
    program = (
        "import sys; sys.argv[1:] = ['health']\n"
        "from entrypoint.cli import main\n"
        f"try: main()\nfinally: print(*sorted(set({libraries!r}) & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=os.environ | {"SHARDBOOT_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode in (0, 1), found.stderr
    line, *imported = found.stdout.splitlines()
    assert "vLLM's default http://*:8000" in line
    assert imported == [""]


def dependencies() -> list[str]:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    return [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]


@pytest.mark.parametrize("name", dependencies())
def test_what_is_installed_with_it_is_imported_by_it(name: str) -> None:
    wanted = re.compile(rf"^\s*(import|from) {name}\b", re.MULTILINE)
    assert any(wanted.search(path.read_text()) for path in PACKAGE.rglob("*.py"))
