"""Whether a checkpoint loads to the very state that the source gives, from recorded evidence. Pure.

Evidence of one side, per rank: digests of parameters and buffers before post-processing, a fixed
input through every module with a quant method after it; and greedy tokens with their logprobs.
Equal bytes prove. Where bytes differ, a second load of the source is the control: what it cannot
reproduce itself (recomputed rotary tables, by 1/256 now and then) may differ by as much again. What
hangs loose on a module has to be there on both sides, in one shape; its bytes, which may be what
memory held before, count where no answers tell more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.errors import ProofError

Side = Literal["source", "checkpoint", "control"]
UNFINISHED: Final = "proof.unfinished"
"""Nothing was found out: no checkpoint is rejected for it."""

LOOSE: Final = "loose"
"""The kind of a tensor that is neither parameter nor buffer: no file holds it."""

SLACK: Final = 2.0
"""How much of the control's own difference is allowed: one sample of noise says little."""

RECOMPUTED_STEP: Final = 1 / 256
"""By this much recomputed tables were seen to differ between fresh processes of one source."""


def rank_evidence_name(side: Side, rank: int) -> str:
    """Return the hidden name of one rank's evidence in staging."""
    return f".{side}-rank-{rank}.json"


def answers_name(side: Side) -> str:
    """Return the hidden name of one side's answers in staging."""
    return f".{side}-answers.json"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing compared: its digest, some of its values, or why it could not be recorded.

    `outline` is the digest of dtype and shape alone, of what hangs loose.
    """

    digest: str
    sketch: tuple[float, ...] = ()
    is_recomputed: bool = False
    unprobed: str = ""
    outline: str = ""


Evidence = Mapping[str, Item]
"""One side's items by name: `rank 0 before model.layers.0…`, `answer 2 tokens`, …"""


def read(ranks: Sequence[bytes], answers: bytes) -> dict[str, Item]:
    """Return one side's evidence from its files. Raises: ProofError when they are odd."""
    items: dict[str, Item] = {}
    try:
        for data in ranks:
            document = json.loads(data)
            for stage in ("before", "after"):
                for name, entry in document[stage].items():
                    items[f"rank {document['rank']} {stage} {name}"] = _item(entry)
        items |= dict(_answers(json.loads(answers)))
    except MALFORMED as error:
        msg = f"evidence cannot be read: {error}"
        raise ProofError(msg) from None
    return items


def _item(entry: Mapping[str, Any]) -> Item:
    if "unprobed" in entry:
        return Item("", unprobed=str(entry["unprobed"]))
    about = {name: entry.get(name) for name in ("digest", "dtype", "shape")}
    outline = digest_json(cast("Json", about | {"digest": None}))
    return Item(
        digest_json(cast("Json", about)),
        tuple(float(value) for value in entry.get("sketch", ())),
        is_recomputed=entry.get("kind") == "recomputed",
        outline=outline if entry.get("kind") == LOOSE else "",
    )


def _answers(document: Mapping[str, Any]) -> Iterator[tuple[str, Item]]:
    if "unanswered" in document:
        yield "answers", Item("", unprobed=str(document["unanswered"]))
    for number, answer in enumerate(document.get("answers", ())):
        yield f"answer {number} tokens", Item(digest_json(answer["tokens"]))
        logprobs = tuple(float(value) for value in answer["logprobs"])
        yield f"answer {number} logprobs", Item(digest_json(list(logprobs)), logprobs)
    for number, pooled in enumerate(document.get("pooled", ())):
        yield f"pooled {number}", _item(pooled)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparing gave: discrepancies in words, and those that a control could excuse."""

    discrepancies: tuple[str, ...]
    excusable: bool

    @property
    def proves(self) -> bool:
        """Whether the checkpoint loads to the source's state."""
        return not self.discrepancies


def compare(source: Evidence, found: Evidence, control: Evidence | None = None) -> Verdict:
    """Compare a checkpoint's evidence with the source's; `control` is the source loaded again."""
    discrepancies: list[str] = []
    excusable = True
    answered = any(name.startswith(("answer ", "pooled ")) for name in source)
    for name in sorted(source.keys() | found.keys()):
        left, right = source.get(name), found.get(name)
        if left is None or right is None:
            discrepancies.append(f"{name}: only the {'checkpoint' if left is None else 'source'}")
            excusable = False
        elif left.unprobed or right.unprobed:
            if bool(left.unprobed) != bool(right.unprobed):
                discrepancies.append(f"{name}: probed on one side only")
                excusable = False
        elif answered and left.outline and left.outline == right.outline:
            continue
        elif left.digest != right.digest and not _excused(left, right, control, name):
            discrepancies.append(f"{name}: differs by {_distance(left, right):.3g}")
    return Verdict(tuple(discrepancies), excusable and control is None)


def only_recomputed(source: Evidence, found: Evidence) -> bool:
    """Tell whether nothing differs but what no file holds, and every process computes anew."""
    return source.keys() == found.keys() and all(
        found[name].digest == item.digest or (item.is_recomputed and found[name].is_recomputed)
        for name, item in source.items()
    )


def _excused(left: Item, right: Item, control: Evidence | None, name: str) -> bool:
    again = None if control is None else control.get(name)
    if again is None or again.digest == left.digest:
        return False
    step = RECOMPUTED_STEP if left.is_recomputed else 0.0
    distance = _distance(left, right)
    return math.isfinite(distance) and distance <= max(SLACK * _distance(left, again), step)


def _distance(left: Item, right: Item) -> float:
    """Return the largest difference of the sketches; infinite where there is nothing to compare."""
    if not left.sketch or len(left.sketch) != len(right.sketch):
        return math.inf
    distances = [abs(a - b) for a, b in zip(left.sketch, right.sketch, strict=True)]
    return math.inf if any(math.isnan(distance) for distance in distances) else max(distances)


def summary(source: Evidence, *, controlled: bool, vllm: str, plugin: str) -> dict[str, Json]:
    """Return what a manifest keeps of a proof that held."""
    unprobed: list[Json] = [name for name, item in source.items() if item.unprobed]
    return {
        "items": len(source) - len(unprobed),
        "unprobed": unprobed,
        "controlled": controlled,
        "evidence": digest_json([[name, source[name].digest] for name in sorted(source)]),
        "vllm": vllm,
        "plugin": plugin,
    }
