"""Which layers are quantized, where vLLM reads that off the names in the weight files.

So it does for GPTQ and AWQ, unless config.json lists them. It looks for `q_proj` in those names; in
a checkpoint's files there is but the fused `qkv_proj`, and vLLM would leave that unquantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from entrypoint.vllm_plugin import compat

LISTS = ("modules_in_block_to_quantize", "modules_to_not_convert")
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""What most models fuse; each may say more."""


def read_fused_names(vllm_config: Any, model_config: Any) -> None:
    """Let vLLM find in a checkpoint's names what it found in the source's.

    To be called before a model is built of `vllm_config`. Where it errs, the model's own tensors
    are not the checkpoint's, and the strict loader says so.
    """
    quant_config = vllm_config.quant_config
    if quant_config is None or not compat.reads_weight_files(quant_config):
        return
    said = getattr(model_config.hf_config, "quantization_config", None) or {}
    for name in LISTS:
        found = getattr(quant_config, name, None)
        if found and isinstance(said, dict) and not said.get(name):
            packed = FUSED | dict(compat.packed_modules(model_config))
            setattr(quant_config, name, sorted(with_parts(found, packed)))
            # Names in a checkpoint are vLLM's already.
            quant_config.apply_vllm_mapper = _leave_alone


def with_parts(names: Iterable[str], packed: Mapping[str, Iterable[str]]) -> set[str]:
    """Return `names`, and for every fused layer among them the names of its parts."""
    found = set(names)
    for name in names:
        prefix, dot, last = name.rpartition(".")
        found |= {f"{prefix}{dot}{part}" for part in packed.get(last, ())}
    return found


def _leave_alone(mapper: object) -> None:
    del mapper
