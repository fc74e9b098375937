"""How this vLLM reads the user's words: asked once, then remembered.

vLLM's own parser answers, in a child of the interpreter that will be exec'd (seconds); the answer
is remembered under a digest of all that went in (milliseconds).
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, NamedTuple, cast

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.question import named_files, question
from entrypoint.engine.resolution import Resolution, WordsRefused, read_answer, shrink_positions
from entrypoint.errors import EngineError
from entrypoint.model.identity import Identity
from entrypoint.state.memory import Memory

RESOLVE_TIMEOUT_SECONDS: Final = 300.0
RESOLVE_PROGRAM: Final = Path(__file__).parents[1] / "vllm_plugin" / "resolve.py"
MAX_ANSWERS: Final = 4
"""Remembered per question: the source's config files may go back and forth."""


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
        asked = _asked(engine, words, environ, about)
        remembered = _recall(memory, asked, identify)
        if remembered is not None:
            return read_answer(remembered, words, about)._replace(asked=asked.words)
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
    shrink_positions(answer, words, about)
    model = cast("dict[str, str | None]", answer["model"])
    identity = identify(cast("str", model["word"]), model["revision"])
    asked = _asked(engine, words, environ, about)
    # What failed may go well the next time; else no boot would ever serve a checkpoint.
    if identity is not None and asked.files is not None and not _recipe(answer).get("failed"):
        _remember(memory, asked, answer, identity)
    return read_answer(answer, words, about)._replace(asked=asked.words)


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
    """Return the remembered answer; where a look hangs, the latest counts.

    One that holds what only the weights tell counts for these very weights.
    """
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
    if identity is None:
        return answers.get(cast("str", record["latest"]))
    answer = answers.get(identity.config_digest)
    if answer is not None and _recipe(answer).get("pinned"):
        weights = cast("Mapping[str, str]", answer.get("weights", {}))
        if not any(identity.ways.get(way) == digest for way, digest in weights.items()):
            return None
    return answer


def _recipe(answer: Mapping[str, Json]) -> Mapping[str, Json]:
    return cast("Mapping[str, Json]", answer["words"])


def _remember(memory: Memory, asked: _Asked, answer: dict[str, Json], identity: Identity) -> None:
    files = cast("str", asked.files)
    known = memory.recall("resolutions", asked.words)
    known = known if isinstance(known, dict) else {}
    by_files = cast("dict[str, dict[str, Json]]", known.get("by_files", {}))
    earlier = cast("dict[str, Json]", by_files.get(files, {}).get("answers", {}))
    answer = answer | {"weights": {**identity.ways}}
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
        try:
            outcome = child.ask(
                [engine.interpreter, "-P", str(RESOLVE_PROGRAM)],
                {"words": list(words), "stand_in": stand_in},
                environ=environ,
                log=log,
                timeout=RESOLVE_TIMEOUT_SECONDS,
            )
        except OSError as error:
            msg = f"{engine.interpreter}: vLLM's Python cannot be started: {error.strerror}"
            raise EngineError(msg) from None
        if isinstance(outcome.answer, dict) and "status" in outcome.answer:
            return outcome.answer
        last = child.last_lines(log)
    if outcome.timed_out:
        msg = f"vLLM did not say within {RESOLVE_TIMEOUT_SECONDS:.0f} s how it reads the words"
    else:
        msg = f"asking vLLM ended with status {outcome.status}: {last}"
    raise EngineError(msg)
