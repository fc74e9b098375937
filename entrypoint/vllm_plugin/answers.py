"""What a whole engine answers to fixed prompts, recorded for a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import write_json
from entrypoint.vllm_plugin import compat
from entrypoint.vllm_plugin.evidence import digest_of, sketch_of
from entrypoint.vllm_plugin.resolved_key import is_moe

TOKENS = 16
LENGTHS = (3, 17, 40)
LONGEST = 1024
"""Of the prompt that crosses a block; blocks of hybrid models can be long."""

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


def record(engine: Any, path: Path) -> None:
    """Ask `engine` (an `LLMEngine`) the fixed prompts and write its answers to `path`.

    Generating: 16 greedy tokens with their logprobs. Pooling: a digest of what is pooled.
    """
    write_json(path, _pooled(engine) if _pools(engine) else _generated(engine))


def unanswerable(vllm_config: Any) -> str:
    """Say why such an engine cannot be asked from here; "" when it can."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1:
        return "the engine spans nodes"
    if parallel.pipeline_parallel_size > 1 and compat.is_cpu():
        return "vLLM generates nothing with pipeline stages on a CPU"
    shares_experts = parallel.enable_expert_parallel and is_moe(vllm_config)
    if shares_experts and parallel.tensor_parallel_size > 1 and compat.is_cpu():
        return "vLLM's kernels for CPUs crash where ranks share out the experts"
    return ""


def prompts(vocabulary: int, block_size: int, longest: int) -> list[list[int]]:
    """Return four prompts of token ids, one longer than a block where `longest` allows it.

    Ids come from the middle of the vocabulary: special tokens, such as those that stand for an
    image, lie at its ends.
    """
    low, high = vocabulary // 8, max(vocabulary // 2, vocabulary // 8 + 1)
    lengths = [*LENGTHS, min(block_size + 5, LONGEST)]
    return [
        [low + (7919 * (n + 1) * (i + 3)) % (high - low) for i in range(min(length, longest))]
        for n, length in enumerate(lengths)
    ]


def _pools(engine: Any) -> bool:
    return str(engine.vllm_config.model_config.runner_type) == "pooling"


def _prompts_for(engine: Any, room: int) -> list[list[int]]:
    config = engine.vllm_config
    block_size = config.cache_config.block_size or max(LENGTHS)
    longest = max(1, config.model_config.max_model_len - room)
    return prompts(config.model_config.get_vocab_size(), block_size, longest)


def _generated(engine: Any) -> Json:
    from vllm import SamplingParams

    asked = _prompts_for(engine, TOKENS)
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    said = _run(engine, asked, sampling)
    answers: list[Json] = []
    for number, prompt in enumerate(asked):
        completion = said[number].outputs[0]
        tokens = [int(token) for token in completion.token_ids]
        chosen = zip(tokens, completion.logprobs, strict=True)
        answers.append(
            {
                "prompt": list[Json](prompt),
                "tokens": list[Json](tokens),
                "logprobs": [float(given[token].logprob) for token, given in chosen],
            }
        )
    return {"answers": answers}


def _pooled(engine: Any) -> Json:
    from vllm import PoolingParams

    supported = engine.get_supported_tasks()
    task = next((task for task in POOLING_TASKS if task in supported), None)
    if task is None:
        return {"pooled": [], "unanswered": f"no known task among {', '.join(supported)}"}
    said = _run(engine, _prompts_for(engine, 0), PoolingParams(task=task))
    pooled = [said[number].outputs.data for number in sorted(said)]
    return {"pooled": [{"digest": digest_of(p), "sketch": sketch_of(p)} for p in pooled]}


def _run(engine: Any, asked: Sequence[Sequence[int]], params: Any) -> Mapping[int, Any]:
    for number, prompt in enumerate(asked):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
    said = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                said[int(output.request_id)] = output
    return said
