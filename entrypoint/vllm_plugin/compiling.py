"""What torch's first compilation builds in a process, built before there is a fork.

vLLM compiles some functions whatever --enforce-eager says, each worker at its first request. The
first compilation of a process takes 2 s, all of its results cached: so much does it import and look
up. In a fork of one that has compiled anything it takes 0.1 s.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

COMPILER: Final = "torch._inductor."
CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


def is_used(names: Iterable[str]) -> bool:
    """Tell by what they have imported whether servers compile."""
    return any(name.startswith(COMPILER) for name in names)


def build(is_harmless: Callable[[Callable[[], None]], bool]) -> None:
    """Compile something, if that `is_harmless`.

    On disk nothing is left of it but headers, which torch compiles once for all users of a host.
    Raises: OSError where no directory is to be had for what it keeps meanwhile.
    """
    made = tempfile.TemporaryDirectory(prefix="shardboot-", ignore_cleanup_errors=True)
    with made as directory, _cached_in(directory):
        if is_harmless(_compile):
            _compile()


def _compile() -> None:
    torch: Any = importlib.import_module("torch")
    bars: Any = importlib.import_module("tqdm").tqdm
    interval = bars.monitor_interval
    # Else a bar would start a thread that watches it, and stays.
    bars.monitor_interval = 0
    try:
        with torch.inference_mode():
            torch.compile(_add, dynamic=True)(torch.zeros(3), 2)
    finally:
        bars.monitor_interval = interval


def _add(tensor: Any, number: int) -> Any:
    return tensor + number


@contextmanager
def _cached_in(directory: str) -> Iterator[None]:
    """Have torch keep what it compiles there for now, and forget afterwards that it did."""
    before = dict(os.environ)
    os.environ[CACHE] = directory
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        with suppress(AttributeError):
            utils: Any = sys.modules.get("torch._inductor.utils")
            utils.clear_caches()
