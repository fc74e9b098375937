"""A fixed input through every module with a vLLM quant method, rank-local.

Post-processing hides weights in packed parameters, closures and kernels' own memory; what a module
computes is the one thing that shows them all.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from entrypoint.vllm_plugin import compat

ROWS = 8
TOKENS = 256
"""Rows of an embedding that are looked up; all of them are digested before post-processing."""

LIKED, DISLIKED = 8.0, -8.0
"""Router logits that leave no doubt which experts are meant."""

ABSORBED = ("W_UK_T", "W_UV", "W_K", "W_K_scale", "W_V", "W_V_scale")
"""What multi-head latent attention makes of its `kv_b_proj`, whose own weight it may empty."""

FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    LookupError,
)
"""What a kernel raises that does not take the input, or is no linear map at all."""


def probe(model: torch.nn.Module, vllm_config: Any) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield by name what a module makes of its input, or in words why it could not be had.

    No probe talks to other ranks, so one that fails on a rank keeps no other waiting. Inputs
    depend on names and shapes only. To be called on a post-processed model.
    """
    with compat.forward_context(vllm_config), torch.no_grad():
        for name, module in model.named_modules():
            for what, run in _probes(module, _Input(name, vllm_config)):
                label = f"{name} ({what})" if what else name
                try:
                    made = run()
                except FAILURES as error:
                    said = str(error).partition("\n")[0][:200]
                    yield label, f"{type(error).__name__}: {said}"
                    continue
                if isinstance(made, torch.Tensor):
                    yield label, made
                else:
                    yield label, f"the result is {type(made).__name__}"


class _Input:
    """Inputs seeded by a module's name: the same bytes wherever they are made."""

    def __init__(self, name: str, vllm_config: Any) -> None:
        self.seed = zlib.crc32(name.encode())
        self.device = torch.device(vllm_config.device_config.device)
        self.dtype = vllm_config.model_config.dtype

    def normal(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
        return values.normal_(generator=generator).to(dtype or self.dtype).to(self.device)


def _probes(module: torch.nn.Module, given: _Input) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ABSORBED:
        tensor = getattr(module, name, None)
        if isinstance(tensor, torch.Tensor):
            yield name, partial(torch.Tensor.detach, tensor)
    kinds = compat.quant_kinds()
    method = getattr(module, "quant_method", None)
    if not isinstance(method, kinds.method):
        return
    if isinstance(method, kinds.experts):
        yield "", lambda: _experts(module, method, given)
    elif isinstance(method, kinds.kv_cache):
        yield "scales", lambda: _scales(module)
    elif isinstance(module, kinds.embedding):
        yield "rows", lambda: method.embedding(module, _token_ids(module, given))
        # Also where it is no head itself: a tied head is the embedding, applied.
        yield "", lambda: _linear(module, method, given, module.embedding_dim)
    else:
        yield "", lambda: _linear(module, method, given, _inputs_of(module))


def _inputs_of(module: torch.nn.Module) -> int:
    size = getattr(module, "input_size_per_partition", None)
    return int(module.input_size if size is None else size)


def _linear(module: torch.nn.Module, method: Any, given: _Input, columns: Any) -> Any:
    dtype = getattr(module, "params_dtype", given.dtype)
    x = given.normal(ROWS, int(columns), dtype if dtype.is_floating_point else None)
    try:
        return method.apply(module, x, getattr(module, "bias", None))
    except FAILURES:
        weight = getattr(module, "weight", None)
        if weight is None or weight.numel() == 0:
            raise
        # Mamba's convolutions are linears in name only: their kernels read the weight as it is.
        return weight.detach()


def _token_ids(module: torch.nn.Module, given: _Input) -> torch.Tensor:
    count = int(module.num_embeddings_per_partition)
    chosen = torch.linspace(0, count - 1, min(count, TOKENS), dtype=torch.float64, device="cpu")
    return chosen.round().to(torch.int64).to(given.device)


def _scales(module: torch.nn.Module) -> torch.Tensor:
    """Return the scales of an attention layer, those on the host and those on the device."""
    named: Mapping[str, Any] = {**module._buffers, **module._parameters, **vars(module)}
    values = [
        float(value)
        for name, value in sorted(named.items())
        if name.endswith(("_scale", "_scale_float")) and isinstance(value, (float, torch.Tensor))
    ]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _experts(layer: torch.nn.Module, method: Any, given: _Input) -> Any:
    """Send tokens to all experts in turn, through the local kernel alone."""
    # A CPU's kernels take local numbers, and read beyond the weights at an expert of another rank.
    experts = int(layer.local_num_experts if compat.is_cpu() else layer.global_num_experts)
    chosen = int(layer.top_k)
    tokens = max(ROWS, -(-experts // chosen))
    hidden = int(layer.hidden_size)
    order = torch.arange(tokens * chosen, device="cpu").reshape(tokens, chosen) % experts
    logits = torch.full((tokens, experts), DISLIKED, device="cpu").scatter(1, order, LIKED)
    ids = getattr(method, "topk_indices_dtype", None) or torch.int32
    compat.prepare_experts(layer)
    known = {
        "layer": layer,
        "x": given.normal(tokens, hidden),
        "topk_weights": torch.full((tokens, chosen), 1 / chosen, device=given.device),
        "topk_ids": order.to(ids).to(given.device),
        "router_logits": logits.to(given.dtype).to(given.device),
    }
    monolithic = bool(getattr(method, "is_monolithic", False))
    return _call(method.apply_monolithic if monolithic else method.apply, known)


def _call(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    """Call with what is known by name; what else is asked for, such as shared experts, is None."""
    return function(
        **{
            name: known.get(name)
            for name, parameter in inspect.signature(function).parameters.items()
            if name in known or parameter.default is inspect.Parameter.empty
        }
    )
