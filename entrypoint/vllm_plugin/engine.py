"""Loading a model in real workers: the executor alone, or a whole engine that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entrypoint.checkpoint.proof import Side, answers_name
from entrypoint.state.files import write_json
from entrypoint.vllm_plugin import answers, refusal


def load(vllm_config: Any, refusals: Path) -> None:
    """Build vLLM's executor and so load the model: no KV cache, no warm-up.

    Raises: SaveError when a rank left a refusal in `refusals`; else whatever vLLM raises.
    """
    from vllm.v1.executor.abstract import Executor

    executor = None
    try:
        executor = Executor.get_class(vllm_config)(vllm_config)
    finally:
        if executor is None:
            refusal.raise_left(refusals)


def load_and_answer(vllm_config: Any, directory: Path, side: Side) -> None:
    """Build a whole engine, and leave in `directory` what it answers.

    Where no engine can be asked, the executor alone loads the model, and the reason is left.
    Raises: as `load`, refusals being in `directory`.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    path = directory / answers_name(side)
    reason = answers.unanswerable(vllm_config)
    if reason:
        load(vllm_config, directory)
        write_json(path, {"answers": [], "unanswered": reason})
        return
    engine = None
    try:
        engine = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
    finally:
        if engine is None:
            refusal.raise_left(directory)
    answers.record(engine, path)
