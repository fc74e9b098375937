"""Noting that vLLM has begun to serve: all that it compiles and warms up lies behind it."""

from __future__ import annotations

import sys
from typing import Final

from entrypoint.vllm_plugin.stop import loader_settings

BEGINS: Final = "uvicorn.lifespan.on"
"""What uvicorn imports when it begins to serve, and nothing before: vLLM waits for its engine
first."""


def note_serving() -> None:
    """Leave a line in the ledger, if this process serves a checkpoint of ours."""
    from entrypoint.vllm_plugin.notes import Notes

    settings = loader_settings(sys.argv)
    if settings is not None:
        Notes.of(settings).line("serving")
