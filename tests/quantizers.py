"""How the weights of tiny models are quantized: one linear's matrix to what its files hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fp8 import by_block, by_channel, by_tensor

if TYPE_CHECKING:
    import torch

GROUP: Final = 64
# The place of each of eight consecutive outputs in one int32 of an AWQ file, lowest bits first.
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize to compressed-tensors' int8 with one scale an output channel."""
    import torch

    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
    quantized = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {f"{name}.weight": quantized, f"{name}.weight_scale": scale}


def int8_static(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize as `int8`, and inputs with one scale a layer: normed ones rarely exceed four."""
    import torch

    input_scale = torch.tensor([4 / 127], dtype=torch.bfloat16)
    return int8(name, weight) | {f"{name}.input_scale": input_scale}


def gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize to GPTQ's symmetric 4 bits: [in / 8, out], a scale by group, zeros stored less 1."""
    import torch

    quantized, scale = _four_bits(weight)
    inputs, outputs = weight.shape[1], weight.shape[0]
    zeros = torch.full((inputs // GROUP, outputs), 7.0)
    return {
        f"{name}.qweight": _pack(quantized).t().contiguous(),
        f"{name}.qzeros": _pack(zeros),
        f"{name}.scales": scale.t().contiguous(),
        f"{name}.g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def wna16(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize to compressed-tensors' packed 4 bits: [out, in / 8], a scale by group."""
    import torch

    quantized, scale = _four_bits(weight)
    return {
        f"{name}.weight_packed": _pack(quantized),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values from 0 to 15 about 8, and the scale of every group of inputs."""
    import torch

    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (grouped.abs().amax(dim=2, keepdim=True) / 7).to(torch.bfloat16)
    quantized = (grouped / scale.float()).round().clamp(-8, 7) + 8
    return quantized.reshape(weight.shape), scale.squeeze(2)


def awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize to AWQ's 4-bit gemm format: [in, out / 8], scales and zeros by groups of inputs."""
    import torch

    grouped = weight.t().reshape(-1, GROUP, weight.shape[0])
    low, high = grouped.amin(dim=1, keepdim=True), grouped.amax(dim=1, keepdim=True)
    scale = ((high - low) / 15).to(torch.bfloat16).float()
    zero = (-low / scale).round().clamp(0, 15)
    quantized = (grouped / scale + zero).round().clamp(0, 15).reshape(-1, weight.shape[0])
    return {
        f"{name}.qweight": _pack(quantized, AWQ_ORDER),
        f"{name}.qzeros": _pack(zero.squeeze(1), AWQ_ORDER),
        f"{name}.scales": scale.squeeze(1).to(torch.bfloat16),
    }


def _pack(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight 4-bit values of a row into each int32, lowest bits first."""
    import torch

    eights = values.to(torch.int64).reshape(values.shape[0], -1, 8)
    packed = torch.zeros(eights.shape[:2], dtype=torch.int64)
    for position, source in enumerate(order):
        packed |= eights[:, :, source] << (4 * position)
    # Above 2 ** 31 the top bit is the sign of what vLLM reads.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


QUANTIZERS: Final[dict[str, Callable[[str, torch.Tensor], dict[str, torch.Tensor]]]] = {
    "int8": int8,
    "int8-static": int8_static,
    "awq": awq,
    "gptq": gptq,
    "wna16": wna16,
    "fp8": by_tensor,
    "fp8-block": by_block,
    "fp8-channel": by_channel,
}
