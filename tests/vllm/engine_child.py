"""One engine of real vLLM: what it answers to a few prompts, and digests of every rank's state.

    python engine_child.py RESULT < {"model": ..., "arguments": {...}, "prompts": [...]}

With `reload` its weights are set to zero, then loaded again in place, before it answers.
Digests are taken before post-processing, of all parameters and buffers in the state dict, and left
beside RESULT by rank. vLLM spawns its workers from this very file, so they record too.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

TOKENS = 16


def record_digests(result: Path) -> None:
    import torch
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def record_and_process(model: torch.nn.Module, *rest: Any, **more: Any) -> None:
        digests = {
            name: hashlib.sha256(
                tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for name, tensor in model.state_dict().items()
            if tensor.numel()
        }
        rank = torch.distributed.get_rank()
        result.with_suffix(f".rank-{rank}").write_text(json.dumps(digests, sort_keys=True))
        process(model, *rest, **more)

    base_loader.process_weights_after_loading = record_and_process


def generate(request: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=request["model"], **request["arguments"])
    if request.get("reload"):
        llm.collective_rpc(forget)
        llm.collective_rpc("reload_weights")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    answers = []
    for output in llm.generate(request["prompts"], sampling):
        completion = output.outputs[0]
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        answers.append(
            {
                "tokens": list(completion.token_ids),
                "logprobs": [given[token].logprob for token, given in chosen],
            }
        )
    return answers


def forget(worker: Any) -> None:
    for parameter in worker.get_model().parameters():
        parameter.data.zero_()


def load_only(request: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor

    config = EngineArgs(model=request["model"], **request["arguments"]).create_engine_config()
    Executor.get_class(config)(config)


def main() -> None:
    request = json.load(sys.stdin)
    answers = []
    if request["prompts"]:
        answers = generate(request)
    else:
        load_only(request)
    Path(sys.argv[1]).write_text(json.dumps(answers))
    sys.stdout.flush()
    sys.stderr.flush()
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


# Also in the workers, where this file is imported as __mp_main__ with the same argv.
if __name__ in ("__main__", "__mp_main__"):
    record_digests(Path(sys.argv[1]))

if __name__ == "__main__":
    main()
