"""What one rank records, for a proof, of the state it loaded.

Before post-processing: digests. After it: what every module with a quant method makes of a fixed
input. Both times also what hangs loose on a module: a tensor that is neither parameter nor buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.proof import LOOSE, Side, rank_evidence_name
from entrypoint.state.files import write_json
from entrypoint.vllm_plugin import compat
from entrypoint.vllm_plugin.memory import blocks, dtype_word, is_direct, memory_of
from entrypoint.vllm_plugin.probes import probe

SKETCH_VALUES = 64
LARGEST = 3.0e38
"""What stands for infinity in a sketch, since JSON has no word for that."""

KNOWN_TO_TORCH: Final = frozenset({"_parameters", "_buffers", "_modules"})

Entries = dict[str, Json]


class Recorder:
    """Leaves one side's evidence of this rank in a directory, once `after` has been called."""

    def __init__(self, directory: Path, side: Side) -> None:
        self.directory = directory
        self.side = side
        self.found_before: Entries = {}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Recorder | None:
        """Return what a loader's settings ask for: None without `record`."""
        if "record" not in settings:
            return None
        return cls(Path(settings["record"]), settings["side"])

    def before(self, model: torch.nn.Module) -> None:
        """Record the model between `load_weights` and post-processing."""
        self.found_before = before(model)

    def after(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Record the post-processed model, and write all that is known."""
        self.write(after(model, vllm_config), circumstances(vllm_config))

    def write(self, found: Entries, under: Entries) -> None:
        """Write what `before` recorded, and what was found after it, in one atomic file."""
        _, _, rank = compat.tp_pp_rank()
        evidence: dict[str, Json] = {"rank": rank, "before": self.found_before, "after": found}
        evidence["circumstances"] = under
        write_json(self.directory / rank_evidence_name(self.side, rank), evidence)


def before(model: torch.nn.Module) -> Entries:
    """Return digest, dtype, shape, kind and sketch of every parameter and buffer, by name.

    Aliases, buffers that are not stored, and what hangs loose are there too.
    """
    return _recorded([*_tensors(model), *_loose_tensors(model)])


def _recorded(tensors: Iterable[tuple[str, torch.Tensor, str]]) -> Entries:
    """Return what is known of each tensor, given with its name and kind.

    Memory is bounded by one block; what several names share is hashed once. A tensor without
    memory has the digest "meta".
    """
    found: Entries = {}
    digests: dict[object, tuple[str, list[Json]]] = {}
    for name, tensor, kind in tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.is_meta:
            digest: tuple[str, list[Json]] = "meta", []
        elif place in digests:
            digest = digests[place]
        else:
            digest = digests[place] = digest_of(tensor), sketch_of(tensor)
        found[name] = {
            "digest": digest[0],
            "dtype": dtype_word(tensor.dtype),
            "shape": list(tensor.shape),
            "kind": kind,
            "sketch": digest[1],
        }
    return found


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter.detach(), "parameter"
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stored = name not in module._non_persistent_buffers_set
                yield dot + name, buffer.detach(), "buffer" if stored else "recomputed"


def _loose_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    for name, value in _loose(model):
        if isinstance(value, torch.Tensor):
            yield name, value.detach(), LOOSE


def _loose(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yield each tensor and number that a module holds as torch does not know of, by name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, value in vars(module).items():
            if name not in KNOWN_TO_TORCH:
                yield from _leaves(dot + name, value)


def _leaves(name: str, value: object) -> Iterator[tuple[str, torch.Tensor | float]]:
    match value:
        case torch.Tensor() | int() | float():
            yield name, value
        case list() | tuple():
            for place, each in enumerate(value):
                yield from _leaves(f"{name}[{place}]", each)
        case dict():
            for key, each in value.items():
                yield from _leaves(f"{name}[{key}]", each)


def loose_state(model: torch.nn.Module) -> Entries:
    """Return all that hangs loose on modules, numbers too, by name: equal where nothing changed."""
    numbers = ((name, value) for name, value in _loose(model) if not torch.is_tensor(value))
    return _recorded(_loose_tensors(model)) | {name: repr(value) for name, value in numbers}


def after(model: torch.nn.Module, vllm_config: Any) -> Entries:
    """Return digest and sketch of what every module with a quant method makes of a fixed input.

    `unprobed` says why there is none. Nothing here talks to other ranks. Stored tensors are not
    looked at: after post-processing many are empty, their bytes inside closures and kernels. What
    hangs loose is looked at once more.
    """
    found = _recorded(_loose_tensors(model))
    for name, made in probe(model, vllm_config):
        if isinstance(made, str):
            found[name] = {"unprobed": made}
        else:
            found[name] = {"digest": digest_of(made), "sketch": sketch_of(made)}
    return found


def circumstances(vllm_config: Any) -> Entries:
    """Return what else than weights decides which bytes a module makes of its input."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "lora": vllm_config.lora_config is not None,
    }


def digest_of(tensor: torch.Tensor) -> str:
    """Return the BLAKE3 of the row-major bytes of a tensor, on any device, of any strides."""
    hasher = blake3()
    if tensor.numel():
        for block, _ in blocks(tensor):
            here = block if is_direct(block) else block.cpu().contiguous()
            hasher.update(memory_of(here))
    return str(hasher.hexdigest())


def sketch_of(tensor: torch.Tensor) -> list[Json]:
    """Return up to 64 evenly spaced values, finite; what has no value of its own, as bytes."""
    count = tensor.numel()
    if count == 0:
        return []
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.view(torch.uint8)
    chosen = torch.linspace(0, count - 1, min(count, SKETCH_VALUES), dtype=torch.float64)
    places = chosen.round().to(torch.int64).to(tensor.device)
    index = torch.unravel_index(places, tensor.shape)
    values = tensor[index] if tensor.dim() else tensor.reshape(1)
    if values.is_complex():
        values = values.real
    numbers = torch.nan_to_num(values.double(), nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    return [float(number) for number in numbers.tolist()]
