"""What vLLM loads of ours: two load formats. Importing this package imports neither vLLM nor torch.

`resolve.py` and `resolved_key.py` are no part of it at run time: they are run by path.
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the load formats `shardboot` and `shardboot-save`; again is no harm.

    vLLM calls this in every process, through the entry point `vllm.general_plugins`.
    """
    from entrypoint.vllm_plugin.compat import register_once
    from entrypoint.vllm_plugin.load_format import ShardbootLoader
    from entrypoint.vllm_plugin.save_format import ShardbootSaver

    register_once("shardboot", ShardbootLoader)
    register_once("shardboot-save", ShardbootSaver)
