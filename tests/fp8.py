"""Tiny models in eight-bit floats. Untried: no kernel of vLLM's CPU build takes them.

What is known of them: `shardboot plan` reads them as it reads any other model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

FP8: Final = ("fp8", "fp8-block", "fp8-channel")
"""One scale a tensor, inputs' too; one a block of 128 x 128; one an output, by compressed-tensors.

Every rank of `fp8-block` must hold whole blocks: at TP=2 it takes `hidden=512`.
"""

BLOCK: Final = 128
LARGEST: Final = 448.0
"""Of float8_e4m3fn."""


def quantization(kind: str) -> dict[str, Any]:
    """Return the `quantization_config` of a kind."""
    if kind == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "static"}
    if kind == "fp8-block":
        blocks = {"weight_block_size": [BLOCK, BLOCK]}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks}
    floats = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": floats | {"strategy": "channel", "dynamic": False},
        "input_activations": floats | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


def by_tensor(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize with one scale, and one for inputs: normed ones rarely exceed four."""
    import torch

    scale = weight.abs().amax() / LARGEST
    return {
        f"{name}.weight": _rounded(weight / scale),
        f"{name}.weight_scale": scale.reshape(1),
        f"{name}.input_scale": torch.tensor([4 / LARGEST]),
    }


def by_block(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize with one scale for every block, which the hub calls the inverse of one."""
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST
    return {
        f"{name}.weight": _rounded((blocks / scale).reshape(weight.shape)),
        f"{name}.weight_scale_inv": scale.reshape(outputs // BLOCK, inputs // BLOCK),
    }


def by_channel(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize with one scale for every output."""
    import torch

    scale = (weight.abs().amax(dim=1, keepdim=True) / LARGEST).to(torch.bfloat16)
    return {f"{name}.weight": _rounded(weight / scale.float()), f"{name}.weight_scale": scale}


def _rounded(values: torch.Tensor) -> torch.Tensor:
    import torch

    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
