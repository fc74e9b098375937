"""What vLLM loads of ours: load formats, notes of how far a start is, and forks.

Importing this package imports neither vLLM nor torch. `resolve.py` and what it loads
(`resolved_key.py`, `resolved_engine.py`) are no part of it at run time: they are run by path.
"""

from __future__ import annotations


def register() -> None:
    """See to it that vLLM knows our load formats, all of them called `shardboot…`.

    vLLM calls this in every process, through the entry point `vllm.general_plugins`; again is no
    harm. It costs nothing where no model is loaded.
    """
    from entrypoint.vllm_plugin.forking import fork_if_told
    from entrypoint.vllm_plugin.late import after_import
    from entrypoint.vllm_plugin.milestones import imports_are_done
    from entrypoint.vllm_plugin.reap import reap_reader
    from entrypoint.vllm_plugin.serving import BEGINS, note_serving
    from entrypoint.vllm_plugin.stop import note_when_told, note_without_server
    from entrypoint.vllm_plugin.uncollected import collect_again

    imports_are_done()
    collect_again()
    # Right before the server waits for its engine, and after it has set its own handlers.
    after_import("vllm.v1.engine.async_llm", note_when_told)
    # A node without HTTP has no such client, and is as far when it starts its first process.
    after_import("multiprocessing.popen_fork", note_without_server)
    after_import(BEGINS, note_serving)
    after_import("vllm.model_executor.model_loader", _register)
    reap_reader()
    fork_if_told()


def _register() -> None:
    from entrypoint.vllm_plugin.compat import register_once
    from entrypoint.vllm_plugin.load_format import ShardbootLoader
    from entrypoint.vllm_plugin.save_format import ShardbootSaver
    from entrypoint.vllm_plugin.tee_format import ShardbootTee
    from entrypoint.vllm_plugin.tune_format import ShardbootTuner

    register_once("shardboot", ShardbootLoader)
    register_once("shardboot-save", ShardbootSaver)
    register_once("shardboot-tee", ShardbootTee)
    register_once("shardboot-tune", ShardbootTuner)
