"""What a resolved `VllmConfig` says about the state of a rank: key, layout, kind.

Loaded by path from `resolve.py`: standard library and vLLM only. Everything here is plain JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any

# Words in the name of an env variable that may choose a kernel's weight layout, or who holds what.
BACKEND_WORDS = (
    *("MOE", "FLASHINFER", "AITER", "MARLIN", "CUTLASS", "DEEP_GEMM", "NVFP4", "MXFP", "FP8"),
    *("INT8", "QUANT", "GEMM", "EXPERT", "EPLB", "MLA", "ATTENTION", "PARTITION", "REPLICATE"),
    *("PADDING", "SHARD_", "W4A8", "HUMMING"),
)


def model(args: argparse.Namespace) -> dict[str, str | None]:
    """Say where the user's words take the model from."""
    names = ("revision", "code_revision", "tokenizer", "hf_config_path")
    return {"word": args.model} | {name: getattr(args, name, None) for name in names}


def layout(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Say over how many nodes and ranks the model is spread, and which of them are here.

    `unplaced` says why that is not known; then `ranks` are none.
    """
    parallel = config.parallel_config
    ranks, unplaced = ranks_here(parallel)
    return {
        "nnodes": getattr(parallel, "nnodes", 1),
        "node_rank": getattr(parallel, "node_rank", 0),
        "world": parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        "ranks": ranks,
        "unplaced": unplaced,
        "dp": parallel.data_parallel_size,
        "dp_local": parallel.data_parallel_size_local,
        "ep": bool(parallel.enable_expert_parallel),
        "headless": bool(args.headless),
    }


def ranks_here(parallel: Any) -> tuple[list[int], str]:
    """Return the ranks whose workers vLLM starts on this node, or none and why that is not known.

    As its `MultiprocExecutor` numbers them: `local_world_size` ranks, from that many times
    `node_rank_within_dp` on (v1/executor/multiproc_executor.py, config/parallel.py).
    """
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    nnodes = getattr(parallel, "nnodes", 1)
    if nnodes == 1:
        return [*range(world)], ""
    backend = parallel.distributed_executor_backend
    here = getattr(parallel, "local_world_size", None)
    place = getattr(parallel, "node_rank_within_dp", None)
    if parallel.data_parallel_size > 1:
        why = f"{parallel.data_parallel_size} data-parallel replicas over them were never tried"
    elif backend != "mp":
        why = f"only vLLM's own executor (mp) was tried over several, not {backend}"
    elif parallel.world_size != world:
        why = "context parallelism over them was never tried"
    elif here is None or place is None or here * nnodes != world:
        why = "this vLLM does not tell which ranks are on which"
    else:
        return [*range(here * place, here * (place + 1))], ""
    return [], why


def server(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Say where HTTP is answered, in the fields of `entrypoint.state.status.Address`.

    `takes_port`: whether --port decides it; with a port a replica, their supervisor has its own.
    """
    is_supervised = bool(getattr(args, "data_parallel_multi_port_external_lb", False))
    no_server = getattr(args, "api_server_count", None) == 0 or getattr(args, "grpc", False)
    is_follower = getattr(config.parallel_config, "node_rank_within_dp", 0) > 0
    return {
        "host": args.host or "",
        "port": args.data_parallel_supervisor_port if is_supervised else args.port,
        "takes_port": not is_supervised,
        "uds": getattr(args, "uds", None) or "",
        "certfile": args.ssl_certfile or "",
        "keyfile": args.ssl_keyfile or "",
        "mutual": int(args.ssl_cert_reqs) == ssl.CERT_REQUIRED,
        "headless": bool(args.headless or no_server or is_follower),
    }


def kind(config: Any) -> dict[str, Any]:
    """Say what about the model calls for a proof, or cannot be served from a checkpoint at all."""
    model_config = config.model_config
    return {
        "moe": is_moe(config),
        "quantized": model_config.quantization is not None,
        "custom_code": _custom_code(model_config),
        "pooling": str(model_config.runner_type) == "pooling",
        "multimodal": bool(model_config.is_multimodal_model),
        "draft": draft_of(config),
        "hybrid": bool(model_config.is_hybrid),
    }


def draft_of(config: Any) -> str:
    """Return where a draft's weights come from: "none", "separate", or the "target" itself."""
    speculative = config.speculative_config
    if speculative is None:
        return "none"
    draft, target = speculative.draft_model_config, config.model_config
    weightless = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
    if draft is None or draft is target or speculative.method in weightless:
        return "none"
    return "target" if draft.model == target.model else "separate"


def key(config: Any, engine: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `entrypoint.checkpoint.key.Key` that vLLM decides.

    Data parallelism, expert parallelism and EPLB change no dense rank's state, so a dense key does
    not tell them apart.
    """
    model_config, parallel = config.model_config, config.parallel_config
    moe = is_moe(config)
    ep = moe and bool(parallel.enable_expert_parallel)
    eplb = ep and bool(parallel.enable_eplb)
    return {
        "architecture": str(model_config.architecture),
        "runner": str(model_config.runner_type),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size if moe else 1,
        "ep": ep,
        "cp": getattr(parallel, "prefill_context_parallel_size", 1)
        * getattr(parallel, "decode_context_parallel_size", 1),
        "eplb": eplb,
        "redundant_experts": parallel.eplb_config.num_redundant_experts if eplb else 0,
        "expert_placement": str(parallel.expert_placement_strategy) if ep else "linear",
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": model_config.quantization,
        "quantization_config": _quantization(model_config),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "hf_overrides": _digest(model_config.hf_overrides),
        "model_impl": str(getattr(model_config.model_impl, "value", model_config.model_impl)),
        "speculative": _speculative(config),
        "multimodal": _multimodal(model_config.multimodal_config),
        "backends": _backends(config, engine["env_names"], environ, moe=moe, ep=ep),
        "vllm": engine["vllm"],
        "platform": _platform(),
    }


def is_moe(config: Any) -> bool:
    """Tell whether the model has experts, which ranks and replicas may share out."""
    model_config = config.model_config
    if hasattr(model_config, "is_moe"):
        return bool(model_config.is_moe)
    return bool(model_config.get_num_experts())


def _custom_code(model_config: Any) -> bool:
    if model_config.trust_remote_code and getattr(model_config.hf_config, "auto_map", None):
        return True
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models.get(model_config.architecture)
    # Plugins register classes, or modules outside vLLM.
    module = getattr(registered, "module_name", "") or ""
    return not module.startswith("vllm.")


def _digest(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`, "" for nothing.

    What JSON has no word for counts by its repr, so two callables are never equal.
    """
    if not value:
        return ""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _quantization(model_config: Any) -> str:
    found = getattr(model_config.hf_config, "quantization_config", None)
    to_dict = getattr(found, "to_dict", None)
    parts = {
        "model": to_dict() if to_dict else found,
        "runtime": getattr(model_config, "quantization_config", None),
    }
    return _digest({name: part for name, part in parts.items() if part})


def _speculative(config: Any) -> str:
    if draft_of(config) == "none":
        return ""
    speculative = config.speculative_config
    tp = getattr(speculative.draft_parallel_config, "tensor_parallel_size", 1)
    return f"{speculative.method}:{draft_of(config)}:tp{tp}"


def _multimodal(found: Any) -> str:
    if found is None:
        return ""
    limits = getattr(found, "limit_per_prompt", {}) or {}
    told = {
        "encoder_only": bool(getattr(found, "mm_encoder_only", False)),
        "encoder_tp": str(getattr(found, "mm_encoder_tp_mode", "")),
        "encoder_attn_dtype": str(getattr(found, "mm_encoder_attn_dtype", None)),
        "language_only": bool(getattr(found, "language_model_only", False)),
        # Some models have one layer more, or fewer.
        "device_normalize": bool(getattr(found, "mm_device_do_normalize", False)),
        "off": sorted(n for n, limit in limits.items() if getattr(limit, "count", limit) == 0),
    }
    return json.dumps(told, sort_keys=True, separators=(",", ":"))


def _backends(
    config: Any, env_names: list[str], environ: Mapping[str, str], *, moe: bool, ep: bool
) -> dict[str, str]:
    from vllm import envs

    kernel = getattr(config, "kernel_config", None)
    chosen: dict[str, Any] = {"linear_backend": getattr(kernel, "linear_backend", None)}
    if moe:
        chosen["moe_backend"] = getattr(kernel, "moe_backend", None)
    if ep:
        # Some of these round hidden sizes up, or add experts; the default does neither.
        chosen["all2all_backend"] = getattr(config.parallel_config, "all2all_backend", None)
    unset = (None, "", "auto", "allgather_reducescatter")
    backends = {name: str(value) for name, value in chosen.items() if value not in unset}
    for name in env_names:
        if name in environ and any(word in name for word in BACKEND_WORDS):
            backends[name] = str(getattr(envs, name))
    return backends


def _platform() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu-{os.uname().machine}"
    if current_platform.is_rocm():
        import torch

        return f"rocm-{torch.cuda.get_device_properties(0).gcnArchName.partition(':')[0]}"
    capability = current_platform.get_device_capability()
    kind = str(current_platform.device_type)
    return f"{kind}-{capability.major}.{capability.minor}" if capability else kind
