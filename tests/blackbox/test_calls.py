"""What a hit asks of the kernel: it looks at a store, and changes nothing there. Needs root."""

from __future__ import annotations

import re
import shutil

import pytest
from blackbox.openhouse import open_house

MUTATING = re.compile(
    r"\b(?:mkdir|mkdirat|rename\w*|unlink\w*|rmdir|link\w*|symlink\w*|[fl]?chmod\w*|[fl]?chown\w*"
    r"|f?truncate|utime\w*|mknod\w*|[fl]?(?:set|remove)xattr|creat|p?write\w*|fallocate)\("
    r"|O_(?:WRONLY|RDWR|CREAT|TRUNC)"
)
FILES = 2000
CALLS = "file,fchmod,fchown,ftruncate,write,pwrite64,pwritev,fallocate,fsetxattr,fremovexattr"
"""All that can change a directory or a file; what only reads an open file is left out."""


def test_a_second_boot_makes_no_mutating_call_inside_a_store(everybodys_python: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    # In memory: a save waits for the disk once a file.
    with open_house(everybodys_python, "/dev/shm") as house:  # noqa: S108 - in a directory of its own
        house.rules(save={"parts": FILES // 2})
        words = ("serve", "--user", "2000", house.model, "-tp", 2)
        house.run(*words)
        trace = house.root / "trace"
        strace = ("strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", str(trace))
        boot = house.finish(house.start(*words, prefix=strace))
        assert boot.events[-1] == "local.hit", boot.stderr
        calls = trace.read_text().splitlines()
        seen = [line for line in calls if f"{house.local}/" in line]
        assert any("manifest.json" in line for line in seen)
        mutating = [line for line in seen if MUTATING.search(line)]
        print(f"{len(mutating)} of {len(seen)} calls inside a store of {FILES} files change it")
        assert len(seen) > FILES
        assert mutating == []
        owners = [line for line in calls if re.search(r"\b[fl]?chown\w*\(", line)]
        assert owners == []
