"""Names of vLLM that moved or came between 0.27 and 0.32, found once, here."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch


def register_once(load_format: str, loader: type) -> None:
    """Register a load format; a second call changes nothing and warns of nothing."""
    from vllm.model_executor import model_loader

    if load_format not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(load_format)(loader)


def source_loader(load_config: Any, load_format: str) -> Any:
    """Return vLLM's own loader for `load_format`, all else as in `load_config`."""
    from vllm.model_executor.model_loader import get_model_loader

    plain = replace(load_config, load_format=load_format, model_loader_extra_config={})
    return get_model_loader(plain)


def is_draft(model_config: Any) -> bool:
    """Tell whether the model is a speculative draft, and not the one that is served."""
    return str(model_config.runner_type) == "draft"


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return vLLM's context in which new tensors have `dtype`."""
    context: AbstractContextManager[None] = _first(
        "vllm.utils.torch_utils", "vllm.model_executor.model_loader.utils"
    ).set_default_torch_dtype(dtype)
    return context


def _first(*modules: str) -> Any:
    for name in modules[:-1]:
        module = importlib.import_module(name)
        if hasattr(module, "set_default_torch_dtype"):
            return module
    return importlib.import_module(modules[-1])


def create_model(loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
    """Build the model with fresh, unwritten parameters on the device that vLLM would load it to."""
    place = vllm_config.load_config.device or vllm_config.device_config.device
    with torch.device(place):
        utils = importlib.import_module("vllm.model_executor.model_loader.utils")
        build = getattr(loader, "create_model", None) or utils.initialize_model
        model: torch.nn.Module = build(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
    return model


def reads_weight_files(quant_config: Any) -> bool:
    """Tell whether vLLM asks the weight files which layers `quant_config` is for."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    plain = getattr(QuantizationConfig, "maybe_update_config", None)
    return getattr(type(quant_config), "maybe_update_config", None) is not plain


def quant_config(model_config: Any, load_config: Any) -> Any:
    """Return what vLLM makes of the model's quantization, for the files `model_config` names."""
    from vllm.config import VllmConfig

    return VllmConfig.get_quantization_config(model_config, load_config)


def packed_modules(model_config: Any) -> dict[str, list[str]]:
    """Return which layers the model's class fuses, and of what."""
    utils = importlib.import_module("vllm.model_executor.model_loader.utils")
    model_class, _ = utils.get_model_architecture(model_config)
    return dict(getattr(model_class, "packed_modules_mapping", None) or {})


_REGISTRIES = (
    # Hooks of compiled modules, bound to them.
    ("torch._dynamo.convert_frame", "_bytecode_hooks"),
    # Rotary embeddings, and their tables, that models share.
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),
)


def _registries() -> dict[tuple[str, str], dict[Any, Any]]:
    """Return, by their places, where models leave something for the whole process."""
    found = {place: getattr(sys.modules.get(place[0]), place[1], None) for place in _REGISTRIES}
    return {place: value for place, value in found.items() if isinstance(value, dict)}


def undo_registrations(vllm_config: Any) -> Callable[[], None]:
    """Return what makes `vllm_config`, vLLM and torch forget every layer built from now on.

    Layers put themselves into containers of the compilation config, by name, and refuse to be
    built twice; which containers differs from version to version. Registries of the whole process
    would keep a model that nobody uses, or hand what was made for it to the next one.
    """
    config = vllm_config.compilation_config
    kept = {
        name: value.copy()
        for name, value in vars(config).items()
        if isinstance(value, dict | list | set)
    }
    known = {place: frozenset(registry) for place, registry in _registries().items()}

    def undo() -> None:
        for place, registry in _registries().items():
            for key in registry.keys() - known.get(place, frozenset()):
                del registry[key]
        for name, value in kept.items():
            now = getattr(config, name)
            if isinstance(now, dict | list | set) and len(now) != len(value):
                now.clear()
                now.extend(value) if isinstance(now, list) else now.update(value)

    return undo


def is_cpu() -> bool:
    """Tell whether vLLM runs its kernels for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_first_replica(vllm_config: Any) -> bool:
    """Tell whether this is the first of the replicas that one server keeps on this node.

    Dense ones know nothing of each other, and each is told that it is rank 0.
    """
    return not vllm_config.parallel_config.data_parallel_rank_local


def worker_class(vllm_config: Any) -> type[Any] | None:
    """Return the class of the workers, as vLLM names it; None where it is not there."""
    named = str(getattr(vllm_config.parallel_config, "worker_cls", ""))
    module, _, name = named.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def fork_workers() -> None:
    """Have workers on a CPU forked, not spawned, where a fork loses nothing: they import nothing.

    vLLM's CPU platform spawns them, since threads, such as OpenMP's, do not survive a fork: so
    this process must have none. Other platforms, and what is set for them, stay as they are.
    """
    if is_cpu() and len(os.listdir("/proc/self/task")) == 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def host_memory_wanted(vllm_config: Any) -> int:
    """Return the bytes of host memory that each worker will take once its model is loaded.

    On a CPU the KV cache lies there: as much as was asked for, else nearly all there is.
    """
    if not is_cpu():
        return 0
    asked = getattr(vllm_config.cache_config, "kv_cache_memory_bytes", None)
    asked = asked or getattr(vllm_config.cache_config, "cpu_kvcache_space_bytes", None)
    return int(asked) if asked else 1 << 60


def tp_pp_rank() -> tuple[int, int, int]:
    """Return this worker's (tp size, pp size, rank): rank = pp_rank x tp + tp_rank."""
    from vllm.distributed import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
    return tp.world_size, pp.world_size, rank


def gather(value: object) -> list[Any]:
    """Return `value` of every worker, in order of their ranks; every worker must call it."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    values: list[Any] = [None] * group.world_size
    if group.world_size == 1:
        return [value]
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def spans_nodes(vllm_config: Any) -> bool:
    """Tell whether the model's workers run on several nodes, each started with words of its own."""
    return int(getattr(vllm_config.parallel_config, "nnodes", 1)) > 1


def first_rank_here(vllm_config: Any) -> int:
    """Return the lowest of the ranks whose workers run on this node."""
    if not spans_nodes(vllm_config):
        return 0
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * parallel.node_rank_within_dp)


_meetings = itertools.count()


def all_come(seconds: float) -> bool:
    """Tell whether every worker calls this; all that do are told the same, `seconds` later at most.

    By the store that they found each other through, since a collective has no end where a worker
    stays away, and would be taken for vLLM's own next one. Every worker must have called it as
    often as the others.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    place = f"shardboot/{next(_meetings)}"
    store.set(f"{place}/{torch.distributed.get_rank()}", b"here")
    everyone = [f"{place}/{rank}" for rank in range(torch.distributed.get_world_size())]
    try:
        store.wait(everyone, timedelta(seconds=seconds))
        seen = "all"
    except torch.distributed.DistStoreError:
        seen = "some"
    # Whoever is first decides for all: another may see the last one come a moment later.
    return bool(store.compare_set(f"{place}/seen", "", seen) == b"all")


class QuantKinds(NamedTuple):
    """vLLM's classes by which a probe tells what a module takes."""

    method: type[Any]
    experts: type[Any]
    kv_cache: type[Any]
    embedding: type[Any]


def quant_kinds() -> QuantKinds:
    """Return the base classes of quant methods, and of embeddings."""
    layers = "vllm.model_executor.layers"

    def named(module: str, name: str) -> type[Any]:
        found: type[Any] = getattr(importlib.import_module(f"{layers}.{module}"), name)
        return found

    return QuantKinds(
        method=named("quantization.base_config", "QuantizeMethodBase"),
        experts=named("fused_moe.fused_moe_method_base", "FusedMoEMethodBase"),
        kv_cache=named("quantization.kv_cache", "BaseKVCacheMethod"),
        embedding=named("vocab_parallel_embedding", "VocabParallelEmbedding"),
    )


@contextmanager
def forward_context(vllm_config: Any) -> Iterator[None]:
    """Set what vLLM's kernels look up during a forward pass; no attention, no tokens of others."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(vllm_config), set_forward_context(None, vllm_config):
        yield


def prepare_experts(layer: Any) -> None:
    """Do what vLLM does before the first forward pass of fused experts."""
    for name in ("_ensure_moe_quant_config_init", "ensure_moe_quant_config_init"):
        if hasattr(layer, name):
            getattr(layer, name)()
            return


def logger() -> Any:
    """Return a logger that vLLM's own configuration covers."""
    from vllm.logger import init_logger

    return init_logger("vllm.shardboot")
