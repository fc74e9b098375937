"""The logical state of a rank: what a checkpoint stores, and the only state that survives it."""

from __future__ import annotations

import torch

from entrypoint.errors import SaveError


def logical_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that vLLM's own sharded loader would expect of this rank, by name.

    Rank-local, on the model's device, sharing its memory. Empty tensors are left out; of tensors
    with equal memory only the smallest name stays; a tensor within a larger contiguous one is left
    out, since the larger one brings it along. Valid between `load_weights` and post-processing.
    """
    spans = [(name, t.detach(), *_span(t)) for name, t in model.state_dict().items() if t.numel()]
    by_storage: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor, int, int]]] = {}
    for name, tensor, begin, end in spans:
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        by_storage.setdefault(storage, []).append((name, tensor, begin, end))
    kept = {
        name
        for group in by_storage.values()
        for name, tensor, begin, end in group
        if not any(_covers(other, (name, tensor, begin, end)) for other in group)
    }
    return {name: tensor for name, tensor, _, _ in spans if name in kept}


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last but one address of the elements; strides are never negative."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _covers(
    other: tuple[str, torch.Tensor, int, int], this: tuple[str, torch.Tensor, int, int]
) -> bool:
    """Tell whether `this` needs no bytes of its own, because `other` has them all."""
    other_name, larger, other_begin, other_end = other
    name, tensor, begin, end = this
    if other_name == name or not larger.is_contiguous():
        return False
    if begin < other_begin or other_end < end:
        return False
    if (begin, end) != (other_begin, other_end) or not tensor.is_contiguous():
        return True
    return other_name < name


def refuse_unsavable(model: torch.nn.Module) -> None:
    """Refuse a model that has no logical state: tensors on meta, or quantized while loading.

    Called on the fresh model, before anything is read. Raises: SaveError.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):
            raise SaveError(
                f"{name}: {type(method).__name__} quantizes while loading; there is no state "
                "between loading and post-processing to save",
                hint="save the quantized model with the tool that made it, and serve that",
                reason="save.online-quant",
            )
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise SaveError(
                f"{name}: a tensor without memory; it is materialised while loading",
                reason="save.meta-tensor",
            )
