"""What this vLLM made of the user's words, as read from the answer that its own parser gave."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.checkpoint.layout import family_name, layout_of
from entrypoint.engine.address import address
from entrypoint.engine.words import kept_positions
from entrypoint.errors import EngineError, ManifestError
from entrypoint.state.status import Address

PROBED: Final = frozenset({"moe", "quantized"})
"""Kinds whose every weight is a module's with a quant method, or a parameter as it was loaded."""


class Resolution(NamedTuple):
    """What vLLM made of the user's words. `key.model` is still empty.

    `drop` are the positions, in the user's words, of what spells the model; `append` are words
    that keep a speculative draft on its own loader, and say what only the source's weights tell.
    `model_word` is the user's own. `has_own_place`: vLLM loads a hub's model from a directory of
    the user's choice. `ranks` are those whose workers run on this one of `nnodes` nodes; none where
    `unplaced` says why. `preload` is LD_PRELOAD as vLLM sets it for processes that it spawns; None
    where it was not asked for that. `asked` is a digest of all that vLLM was asked: words,
    environment, versions, machine.
    """

    key: Key
    model_word: str
    revision: str | None
    plugin: str | None
    drop: tuple[int, ...]
    append: tuple[str, ...]
    gives_served_name: bool
    unverified: str
    nnodes: int
    ranks: tuple[int, ...]
    unplaced: str
    load_format: str
    has_extra_config: bool
    has_own_place: bool
    draft: str
    has_other_config: bool
    kind: Mapping[str, bool]
    server: Address
    preload: str | None = None
    asked: str = ""

    @property
    def unruled(self) -> str:
        """Return why a structural check is not enough to trust a checkpoint; "" for dense models.

        Quantized, MoE and the like have weights that vLLM works on further after loading.
        """
        kinds = [name for name, is_so in sorted(self.kind.items()) if is_so]
        if untried(self.key.vllm):
            kinds.append("untried vLLM")
        return ", ".join(kinds).replace("_", " ")

    @property
    def shows_all(self) -> bool:
        """Whether all that vLLM makes of the weights shows in what their own modules compute.

        What else is not dense, and what was never tried, has to answer prompts for that.
        """
        kinds = {name for name, is_so in self.kind.items() if is_so}
        return kinds <= PROBED and not untried(self.key.vllm)

    @property
    def family(self) -> dict[str, Json]:
        """Return what a line of the ledger says of which deployment it is about."""
        name = family_name(self.model_word, self.key)
        return {"family": self.key.family(self.model_word), "family_name": name}


class WordsRefused(NamedTuple):
    """vLLM does not take these words: it shall say so itself."""

    message: str


OLDEST_TRIED: Final = (0, 27)
NEWEST_TRIED: Final = (0, 32)


def untried(version: str) -> str:
    """Return a warning about a vLLM that checkpoints were never tried with, or ""."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and OLDEST_TRIED <= (int(match[1]), int(match[2])) <= NEWEST_TRIED:
        return ""
    oldest, newest = (".".join(map(str, tried)) for tried in (OLDEST_TRIED, NEWEST_TRIED))
    return (
        f"vLLM {version}: shardboot was tried with {oldest} to {newest}; "
        "its checkpoints are proved before they are served"
    )


def shrink_positions(
    answer: dict[str, Json], words: Sequence[str], about: Mapping[str, Json]
) -> None:
    """Count the model's positions among the kept words: the others may move under one answer."""
    kept = kept_positions(words, cast("Mapping[str, Json]", about["ignorable"]))
    recipe = cast("dict[str, Json]", answer["words"])
    drop = cast("list[int]", recipe["drop"])
    recipe["drop"] = [kept.index(position) for position in drop]
    if isinstance(draft_in := recipe.get("draft_in"), int):
        recipe["draft_in"] = kept.index(draft_in)


def read_answer(
    answer: Mapping[str, Json], words: Sequence[str], about: Mapping[str, Json]
) -> Resolution:
    """Make a Resolution of an answer whose positions were shrunk, for these very words.

    Raises: EngineError for an answer that cannot be.
    """
    kept = kept_positions(words, cast("Mapping[str, Json]", about["ignorable"]))
    recipe = cast("dict[str, Json]", answer["words"])
    model = cast("dict[str, str | None]", answer["model"])
    layout = cast("dict[str, Json]", answer["layout"])
    load = cast("dict[str, Json]", answer["load"])
    kind = cast("dict[str, Json]", answer["kind"])
    fields = cast("dict[str, Json]", answer["key"])
    append = tuple(cast("list[str]", recipe["speculative"]))
    if isinstance(draft_in := recipe.get("draft_in"), int):
        append = _draft_words(words[kept[draft_in]])
    append += tuple(cast("list[str]", recipe.get("pinned", [])))
    try:
        key = Key.from_json({"model": "", "engine": "vllm", "format": FORMAT, **fields})
    except ManifestError as error:
        raise EngineError(f"vLLM's answer is odd: {error}") from None
    nnodes = cast("int", layout["nnodes"])
    ranks = tuple(layout_of(key).ranks)
    if nnodes > 1:
        ranks = tuple(cast("list[int]", layout.get("ranks", [])))
    if not {*ranks} <= {*layout_of(key).ranks}:
        raise EngineError(f"vLLM's answer is odd: ranks {ranks} of {layout_of(key).world}")
    return Resolution(
        key=key,
        model_word=cast("str", model["word"]),
        revision=model["revision"],
        plugin=cast("str | None", about["plugin"]),
        drop=tuple(kept[position] for position in cast("list[int]", recipe["drop"])),
        append=append,
        gives_served_name=bool(recipe["served_name"]),
        unverified="" if recipe["verified"] else str(recipe.get("why", "")) or "unknown",
        nnodes=nnodes,
        ranks=ranks,
        unplaced=str(layout.get("unplaced", "")),
        load_format=str(load["format"]),
        has_extra_config=bool(load["extra_config"]),
        has_own_place=bool(load.get("elsewhere")),
        draft=str(kind["draft"]),
        has_other_config=bool(model.get("hf_config_path")),
        kind={name: value for name, value in kind.items() if isinstance(value, bool)},
        server=address(words, cast("Mapping[str, Json] | None", answer.get("server"))),
        preload=cast("str | None", answer.get("preload")),
    )


def _draft_words(word: str) -> tuple[str, str]:
    """Return the user's speculative config again, its draft kept on vLLM's own loader."""
    value = word.partition("=")[2] if word.startswith("-") else word
    config = json.loads(value) | {"draft_load_config": {"load_format": "auto"}}
    return "--speculative-config", json.dumps(config)
