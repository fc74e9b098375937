"""Which files belong to which rank, by vLLM's own file names. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import re
from collections.abc import Iterable
from typing import NamedTuple

from entrypoint.checkpoint.key import Key

SHARD_NAME = re.compile(
    r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-(?P<part>\d+)\.safetensors"
)
"""vLLM's `TP_ONLY_PATTERN` and `PP_AND_TP_PATTERN` (sharded_state_loader.py), as one pattern."""


class Layout(NamedTuple):
    """How one replica of a model is spread over ranks; `world` = tp x pp."""

    tp: int
    pp: int

    @property
    def world(self) -> int:
        """Number of ranks that hold different state."""
        return self.tp * self.pp

    @property
    def ranks(self) -> range:
        """All ranks of one replica: rank = pp_rank x tp + tp_rank, as vLLM numbers its workers."""
        return range(self.world)

    def in_words(self, ranks: Iterable[int]) -> str:
        """Return ranks as people say them: `ranks 0-1, 3 of 4`."""
        spans: list[list[int]] = []
        for rank in sorted(ranks):
            if spans and rank == spans[-1][1] + 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        said = ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in spans)
        is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
        return f"{'rank' if is_one else 'ranks'} {said or 'none'} of {self.world}"

    def shard_name(self, rank: int, part: int) -> str:
        """Return the file name that vLLM's own sharded loader looks for."""
        if self.pp == 1:
            return f"model-rank-{rank}-part-{part}.safetensors"
        return f"model-pp-{rank // self.tp}-tp-{rank % self.tp}-part-{part}.safetensors"

    def rank_of(self, name: str) -> tuple[int, int] | None:
        """Return (rank, part) of a shard file's name under this layout, or None."""
        match = SHARD_NAME.fullmatch(name)
        if match is None:
            return None
        if match["rank"] is not None:
            rank = int(match["rank"])
        else:
            rank = int(match["pp"]) * self.tp + int(match["tp"])
        part = int(match["part"])
        return (rank, part) if self.shard_name(rank, part) == name else None


def layout_of(key: Key) -> Layout:
    """Return the layout that `key` asks for; data-parallel replicas hold equal state."""
    return Layout(tp=key.tp, pp=key.pp)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def checkpoint_name(model: str, key: Key) -> str:
    """Return the directory name: stable, speaking, and unique by twelve digits of the key.

    Stable, because vLLM's compile cache is keyed by the model path.
    """
    return model_in_name(model) + name_words(key) + key.digest[:12]


def model_in_name(model: str) -> str:
    """Return how the names of a model's checkpoints begin."""
    return _safe(model.rstrip("/").rsplit("/", 1)[-1])[:80]


def name_words(key: Key) -> str:
    """Return what stands in a name between the model's and the digits."""
    return "-".join(["", *_layout_words(key), f"vllm{_safe(key.vllm)}", ""])


def family_name(model: str, key: Key) -> str:
    """Return how the names of all releases of one deployment begin: model, layout and format."""
    return "-".join([model_in_name(model), *_layout_words(key)])


def _layout_words(key: Key) -> list[str]:
    parts = [f"tp{key.tp}"]
    if key.pp > 1:
        parts.append(f"pp{key.pp}")
    if key.ep:
        parts.append("ep")
    parts.append(_safe(_DTYPES.get(key.dtype, key.dtype)))
    if key.quantization:
        parts.append(_safe(key.quantization))
    return parts


def _safe(word: str) -> str:
    # A leading dot would hide the directory, and hidden names are staging and trash.
    return re.sub(r"[^A-Za-z0-9._-]+", "_", word).strip(".") or "model"


GENERATION = re.compile(r"(?P<base>.+?)(?:-g(?P<generation>[2-9]|[1-9][0-9]+))?")


def generation_of(name: str) -> tuple[str, int]:
    """Split a name into its base and its generation; a name without `-gN` is generation 1."""
    match = GENERATION.fullmatch(name)
    if match is None:
        return name, 1
    return match["base"], int(match["generation"] or 1)


def with_generation(base: str, generation: int) -> str:
    """Return the name of the `generation`-th save of one key."""
    return base if generation == 1 else f"{base}-g{generation}"
