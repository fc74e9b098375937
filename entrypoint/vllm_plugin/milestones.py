"""Moments of vLLM's own start, seen by a worker and noted for the boot's timeline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from entrypoint.checkpoint.digest import Json
from entrypoint.state import process
from entrypoint.vllm_plugin.notes import Notes

STEPS: Final = {
    "determine_available_memory": "profile",
    "initialize_from_config": "kv-cache",
    "compile_or_warm_up_model": "compile",
}
"""What vLLM has its workers do between loading and serving, by their methods of that name."""

_imported: list[float] = []


def imports_are_done() -> None:
    """Remember when vLLM first called us in this process: it has been imported by then.

    A forked process imports nothing itself, and goes by its parent's time.
    """
    if not _imported:
        _imported.append(time.time())


def descent() -> dict[str, Json]:
    """Return for a note when the imports were done, and when each process down to here began."""
    starts: list[Json] = [round(start, 3) for start in process.starts()]
    imported: list[Json] = [round(moment, 3) for moment in _imported]
    return {"processes": starts, **({"imported": imported[0]} if imported else {})}


def note_steps(worker: type[Any] | None, vllm_config: Any, notes: Notes) -> None:
    """Have a class of workers note how long each of its steps takes; what is not there is not.

    With it goes what vLLM itself says that compiling took of it, where it counts that.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    for method, phase in STEPS.items():
        do = getattr(worker, method, None)
        if notes.state is not None and callable(do):
            setattr(worker, method, _noted(do, phase, compilation, notes))


def _noted(
    do: Callable[..., Any], phase: str, compilation: Any, notes: Notes
) -> Callable[..., Any]:
    @functools.wraps(do)
    def noted(*args: Any, **kwargs: Any) -> Any:
        start, before = time.time(), _compiled(compilation)
        answer = do(*args, **kwargs)
        compiled = _compiled(compilation) - before
        more = {"compiled": round(compiled, 3)} if compiled > 0 else {}
        notes.line("phase", phase=phase, start=round(start, 3), **more)
        return answer

    return noted


def _compiled(compilation: Any) -> float:
    """Return the seconds that vLLM has compiled for so far in this process."""
    seconds = getattr(compilation, "compilation_time", 0.0)
    return seconds if isinstance(seconds, float) else 0.0
