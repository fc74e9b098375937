"""Whether a checkpoint was made for the very engine that is about to load it.

Boot goes by an answer of vLLM that may have been remembered, under a question that may have lacked
something. The engine itself cannot be wrong about itself.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from vllm import envs

from entrypoint.checkpoint.key import Key, differences
from entrypoint.errors import KeyMismatchError
from entrypoint.vllm_plugin import resolved_key


def require_same_engine(key: Key, vllm_config: Any) -> None:
    """Compare all fields of `key` that a worker can tell: all but the model's identity.

    Of variables that choose backends those that the key names: vLLM itself sets others.
    Raises: KeyMismatchError.
    """
    # Another vLLM may not have them all any more.
    names = sorted(key.backends.keys() & set(envs.environment_variables))
    engine = {"vllm": importlib.metadata.version("vllm"), "env_names": names}
    told = resolved_key.key(vllm_config, engine, key.backends)
    found = differences(Key.from_json({**key.to_json(), **told}), key)
    if found:
        said = "; ".join(f"{each.field} {each.found}, this engine {each.wanted}" for each in found)
        raise KeyMismatchError(f"it was made for {said}")
