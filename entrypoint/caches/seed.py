"""What vLLM knows of models already, for caches that are new.

It looks into a model's code in a process of its own, for seconds, and keeps what it found; whoever
asked it how it reads its words, or saved a checkpoint, has had it do so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MODEL_INFOS: Final = "modelinfos"
_MOST: Final = 64
_MOST_BYTES: Final = 64 * 1024


def seed(root: Path, environ: Mapping[str, str]) -> None:
    """Copy what this user's usual caches hold of that to `root`, as far as it can be read."""
    usual = environ.get("VLLM_CACHE_ROOT") or f"{_caches(environ)}/vllm"
    with contextlib.suppress(OSError), os.scandir(f"{usual}/{MODEL_INFOS}") as entries:
        small = [each for each in entries if each.is_file() and each.stat().st_size <= _MOST_BYTES]
        (root / MODEL_INFOS).mkdir(parents=True)
        for each in small[:_MOST]:
            shutil.copyfile(each.path, root / MODEL_INFOS / each.name)


def _caches(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
