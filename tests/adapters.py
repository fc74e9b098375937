"""A tiny LoRA adapter as peft writes one, made from a seed, for a model of `models`."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Final

RANK: Final = 8
TARGETS: Final = ("q_proj", "v_proj", "down_proj")
GAIN: Final = 0.5
"""Enough for other words than the model's own."""


def make_adapter(model: Path, directory: Path, *, seed: int = 0) -> None:
    """Write an adapter for the linear layers of `model` that `TARGETS` names."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    shapes: dict[str, tuple[int, int]] = {}
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a dict
            if name.removesuffix(".weight").endswith(TARGETS):
                outputs, inputs = weights.get_slice(name).get_shape()
                shapes[name.removesuffix(".weight")] = outputs, inputs

    def values(name: str, shape: tuple[int, int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        return drawn * (GAIN / math.sqrt(shape[1]))

    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = values(f"{name} A", (RANK, inputs))
        tensors[f"{prefix}.lora_B.weight"] = values(f"{name} B", (outputs, RANK))
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
