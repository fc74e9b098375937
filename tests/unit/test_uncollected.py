"""A console script of Python, run by us and not by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.engine.executable import Executable, find
from entrypoint.launch import quickly

WHOLE = """
import sys, gc
print(sys.argv, sys.path[0], __name__, __file__, gc.isenabled())
print(open("/proc/self/comm").read().strip())
from entrypoint.vllm_plugin import register
register()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""


@pytest.mark.parametrize(
    ("first", "flags"),
    [
        ("#!{python}\n", ()),
        ("#!{python} -sP\n", ("-sP",)),
        ("#!{python} -I\n", ("-I",)),
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n", ()),
        ("#!/bin/sh\n'''exec' {python} -E \"$0\" \"$@\"\n' '''\n", ("-E",)),
    ],
    ids=["plain", "safe path", "isolated", "pip's for long paths", "and with a flag"],
)
def test_a_script_finds_what_it_would_find_by_itself(
    first: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "real"
    script.write_text(first.format(python=sys.executable) + WHOLE)
    script.chmod(0o755)
    vllm = tmp_path / "vllm"
    vllm.symlink_to(script)
    found = find(str(vllm), {})
    assert found == Executable(str(vllm), sys.executable, flags)
    alone, run = (said([*before, str(vllm), "serve", "a b"]) for before in ([], quickly(found)))
    assert alone[0].removesuffix("True") == run[0].removesuffix("False")
    # By the shell it is named for the Python.
    assert alone[1] in ("vllm", Path(sys.executable).name)
    assert run[1:] == ["vllm", "True True"]


def said(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_no_file_beside_it_hides_one_of_pythons() -> None:
    beside = {path.stem for path in Path(quickly(Executable("", ""))[-1]).parent.glob("*.py")}
    assert "uncollected" in beside
    assert beside & sys.stdlib_module_names == set()
