"""How this vLLM reads the user's words.

vLLM's own parser answers, in a child of the interpreter that will be exec'd (seconds); the answer
is remembered under a digest of all that went in (milliseconds).
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, NamedTuple, cast

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.checkpoint.layout import family_name, layout_of
from entrypoint.engine.address import address
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.question import named_files, question
from entrypoint.engine.words import kept_positions
from entrypoint.errors import EngineError, ManifestError
from entrypoint.model.identity import Identity
from entrypoint.state.memory import Memory
from entrypoint.state.status import Address

RESOLVE_TIMEOUT_SECONDS: Final = 300.0
RESOLVE_PROGRAM: Final = Path(__file__).parents[1] / "vllm_plugin" / "resolve.py"
MAX_ANSWERS: Final = 4
"""Remembered per question: the source's config files may go back and forth."""

PROBED: Final = frozenset({"moe", "quantized"})
"""Kinds whose every weight is a module's with a quant method, or a parameter as it was loaded."""


class Resolution(NamedTuple):
    """What vLLM made of the user's words. `key.model` is still empty.

    `drop` are the positions, in the user's words, of what spells the model; `append` are words
    that keep a speculative draft on its own loader. `model_word` is the user's own.
    `has_own_place`: vLLM loads a hub's model from a directory of the user's choice. `ranks` are
    those whose workers run on this one of `nnodes` nodes; none where `unplaced` says why.
    `preload` is LD_PRELOAD as vLLM sets it for processes that it spawns; None where it was not
    asked for that.
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


def nothing_to_borrow(_word: str, _revision: str | None) -> AbstractContextManager[str | None]:
    """Return no directory for any model."""
    return nullcontext()


def resolve(
    engine: Executable,
    words: Sequence[str],
    environ: Mapping[str, str],
    memory: Memory,
    identify: Callable[[str, str | None], Identity | None],
    borrow: Callable[[str, str | None], AbstractContextManager[str | None]] = nothing_to_borrow,
    asking: Callable[[], None] = lambda: None,
) -> Resolution | WordsRefused:
    """Return how this vLLM reads `words` (all after `vllm serve`), from memory where possible.

    `identify(model word, revision)` looks at the source; None means that it hangs, and then the
    last answer counts. `borrow` yields a directory with the config of a model that is not here, or
    None. `asking` is called before vLLM is asked, which takes seconds.
    Raises: EngineError when vLLM can be asked neither way; what `borrow` raises.
    """
    environ = with_plugin(environ)
    engine_question = digest_json([engine.path, engine.interpreter])
    about = memory.recall("engines", engine_question)
    if isinstance(about, dict):
        remembered = _recall(memory, _asked(engine, words, environ, about), identify)
        if remembered is not None:
            return _read(remembered, words, about)
    asking()
    answer = _ask(engine, words, environ)
    if answer["status"] != "ok" and isinstance(unread := answer.get("model"), dict):
        # vLLM took the words, and could not make a config of them: perhaps for want of the model's.
        with borrow(str(unread["word"]), cast("str | None", unread["revision"])) as directory:
            if directory is not None:
                answer = _ask(engine, words, environ, directory)
    if answer["status"] != "ok":
        return WordsRefused(str(answer.get("message", "")))
    about = cast("dict[str, Json]", answer["engine"])
    memory.remember("engines", engine_question, about)
    _shrink_positions(answer, words, about)
    model = cast("dict[str, str | None]", answer["model"])
    identity = identify(cast("str", model["word"]), model["revision"])
    asked = _asked(engine, words, environ, about)
    if identity is not None and asked.files is not None:
        _remember(memory, asked, answer, identity)
    return _read(answer, words, about)


class _Asked(NamedTuple):
    """A question: its digest without files, and that of the files, None when they hang."""

    words: str
    files: str | None


def _asked(
    engine: Executable,
    words: Sequence[str],
    environ: Mapping[str, str],
    about: Mapping[str, Json],
) -> _Asked:
    ignorable = cast("Mapping[str, Json]", about["ignorable"])
    return _Asked(question(engine, words, environ, about), named_files(words, ignorable))


def _recall(
    memory: Memory,
    asked: _Asked,
    identify: Callable[[str, str | None], Identity | None],
) -> dict[str, Json] | None:
    """Return the remembered answer; where a look hangs, the latest counts."""
    known = memory.recall("resolutions", asked.words)
    if not isinstance(known, dict) or "by_files" not in known:
        return None
    by_files = cast("dict[str, dict[str, Json]]", known["by_files"])
    record = by_files.get(asked.files or cast("str", known["latest"]))
    if record is None:
        return None
    model = cast("dict[str, str | None]", record["model"])
    answers = cast("dict[str, dict[str, Json]]", record["answers"])
    identity = identify(cast("str", model["word"]), model["revision"])
    wanted = cast("str", record["latest"]) if identity is None else identity.config_digest
    return answers.get(wanted)


def _remember(memory: Memory, asked: _Asked, answer: dict[str, Json], identity: Identity) -> None:
    files = cast("str", asked.files)
    known = memory.recall("resolutions", asked.words)
    known = known if isinstance(known, dict) else {}
    by_files = cast("dict[str, dict[str, Json]]", known.get("by_files", {}))
    earlier = cast("dict[str, Json]", by_files.get(files, {}).get("answers", {}))
    record: dict[str, Json] = {
        "model": answer["model"],
        "answers": _latest(earlier, identity.config_digest, answer),
        "latest": identity.config_digest,
    }
    kept = _latest(cast("dict[str, Json]", by_files), files, record)
    memory.remember("resolutions", asked.words, {"by_files": kept, "latest": files})


def _latest(known: dict[str, Json], name: str, value: Json) -> dict[str, Json]:
    """Add an entry as the newest, and forget the oldest."""
    others = [(key, entry) for key, entry in known.items() if key != name]
    return dict(others[-MAX_ANSWERS + 1 :]) | {name: value}


def _ask(
    engine: Executable,
    words: Sequence[str],
    environ: Mapping[str, str],
    stand_in: str | None = None,
) -> dict[str, Json]:
    import tempfile  # noqa: PLC0415 - a remembered answer needs neither

    from entrypoint import child  # noqa: PLC0415

    with tempfile.TemporaryFile() as log:
        outcome = child.ask(
            [engine.interpreter, "-P", str(RESOLVE_PROGRAM)],
            {"words": list(words), "stand_in": stand_in},
            environ=environ,
            log=log,
            timeout=RESOLVE_TIMEOUT_SECONDS,
        )
        if isinstance(outcome.answer, dict) and "status" in outcome.answer:
            return outcome.answer
        last = child.last_lines(log)
    if outcome.timed_out:
        msg = f"vLLM did not say within {RESOLVE_TIMEOUT_SECONDS:.0f} s how it reads the words"
    else:
        msg = f"asking vLLM ended with status {outcome.status}: {last}"
    raise EngineError(msg)


def _shrink_positions(
    answer: dict[str, Json], words: Sequence[str], about: Mapping[str, Json]
) -> None:
    """Count the model's positions among the kept words: the others may move under one answer."""
    kept = kept_positions(words, cast("Mapping[str, Json]", about["ignorable"]))
    recipe = cast("dict[str, Json]", answer["words"])
    drop = cast("list[int]", recipe["drop"])
    recipe["drop"] = [kept.index(position) for position in drop]
    if isinstance(draft_in := recipe.get("draft_in"), int):
        recipe["draft_in"] = kept.index(draft_in)


def _read(
    answer: Mapping[str, Json], words: Sequence[str], about: Mapping[str, Json]
) -> Resolution:
    """Make a Resolution of an answer, for these very words."""
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
