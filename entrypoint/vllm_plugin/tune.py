"""The tuning child: one executor that saves the source in several sizes and loads each of them.

    python -P -m entrypoint.vllm_plugin.tune ANSWER_FD < {"words": [...], "staging": DIR, ...}

One JSON answer: `ok`, or `refused` with a reason code. What was measured stands in the ledger in
staging, line by line as it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.vllm_plugin import engine, program, save
from entrypoint.vllm_plugin.tune_format import SETTINGS


def tune(request: Mapping[str, Any]) -> program.Answer:
    """Measure the model that the words name; return the answer.

    Raises: RejectedError, SaveError when the model cannot be saved; whatever vLLM raises when it
    fails.
    """
    asker, args = save.parse(request["words"])
    settings = {name: request[name] for name in SETTINGS - {"source_format"}}
    settings["source_format"] = args.load_format
    config = asker.config(save.for_loading(asker, args, "shardboot-tune", settings))
    save.refuse_replicas(config)
    engine.load(config, Path(request["staging"]))
    return {"status": "ok"}


if __name__ == "__main__":
    program.run(tune, rejected="save.rejected")
