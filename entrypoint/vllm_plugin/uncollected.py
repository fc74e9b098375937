"""vLLM's console script, whose imports nobody interrupts to look for garbage.

    PYTHON uncollected.py /path/to/vllm serve …

Python looks through all objects again and again while imports make millions of them: a fifth of
the 8 s that vLLM's take, and there is next to no garbage. Otherwise the script finds what it would
find if it were run by itself. Standard library alone.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from contextlib import suppress


def collect_again() -> None:
    """Collect garbage from now on, where nobody did, but none of what is there already.

    It is never written to that way: its pages stay shared with every fork.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def main() -> None:
    """Run the script; our plugin ends the exception, which vLLM calls when it is imported."""
    gc.disable()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    with suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as name:
        # What the kernel calls a script that it starts itself (proc(5)).
        name.write(os.path.basename(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
