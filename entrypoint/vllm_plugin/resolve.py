"""Ask the vLLM of this interpreter what the words after `vllm serve` mean.

A program of its own, run by path in the interpreter that will be exec'd, where our package may be
missing: standard library and vLLM only. A JSON request on stdin, one JSON answer on a descriptor:

    python -P resolve.py ANSWER_FD < {"words": ["MODEL", "-tp", "2"], "stand_in": null}

The answer holds digests, counts, names and the server's address, as vLLM resolved them, and never
a word of argv that could be a credential. Exit 0 with an answer; anything else means that vLLM
could not be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SENTINEL = "/shardboot-sentinel/model"
SPECULATIVE = "--speculative-config"


class RejectedError(Exception):
    """vLLM does not accept the user's words; the message is vLLM's own, in one line."""


FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RejectedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What vLLM, and the libraries that read configs and tokenizers for it, give up with."""


class Asker:
    """vLLM's own `serve` parser, built as its command line builds it, plugins loaded."""

    def __init__(self) -> None:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        _cli_env_setup()
        load_general_plugins()
        self.parser = FlexibleArgumentParser(description="vLLM CLI")
        self.command = ServeSubcommand()
        subparsers = self.parser.add_subparsers(required=False, dest="subparser")
        self.serve = self.command.subparser_init(subparsers)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return what vLLM reads in `words`, `model` as `vllm serve` uses it.

        Raises: RejectedError.
        """
        import yaml

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                args: argparse.Namespace = self.parser.parse_args(["serve", *words])
        except SystemExit:
            raise RejectedError(_last_line(said.getvalue())) from None
        except (ArithmeticError, AssertionError, AttributeError, LookupError) as error:
            raise RejectedError(_last_line(str(error) or type(error).__name__)) from None
        except (argparse.ArgumentError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise RejectedError(_last_line(str(error))) from None
        if args.model_tag is not None:
            args.model = args.model_tag
        return args

    def config(self, args: argparse.Namespace) -> Any:
        """Return the `VllmConfig` that vLLM makes of `args`. Raises: RejectedError."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        try:
            self.command.validate(args)
            # It fills in what it is given, as a draft or how to pool: the next one must not see it.
            engine_args = AsyncEngineArgs.from_cli_args(copy.deepcopy(args))
            headless = {"headless": True} if args.headless else {}
            return engine_args.create_engine_config(**headless)
        except (SystemExit, NotImplementedError, OSError, TypeError, ValueError) as error:
            raise RejectedError(_last_line(str(error))) from None


def _cli_env_setup() -> None:
    for name in ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name).cli_env_setup()
            return


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    # pydantic ends with a link that says nothing, and begins its own sentence with the field.
    lines = [line for line in lines if line and not line.startswith("For further information")]
    message = (lines[-1] if lines else "vLLM gave no reason").partition(" [type=")[0]
    head, unknown, rest = message.partition("unrecognized arguments:")
    if unknown:
        # A mistyped option drags its value along, and that may be a key.
        names = [w.partition("=")[0] for w in rest.split() if w.startswith("-")]
        message = f"{head}{unknown} {' '.join(names)}".rstrip()
    return message[:500]


def recipe(asker: Asker, words: list[str], args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Say how to turn the user's words into those that serve a checkpoint, and try it out.

    `verified` is true when vLLM reads the new words as the old ones in everything but the model,
    the load format and its config, the served name and the draft's load format, and a checkpoint's
    files as the model's. `failed` where that could not be found out: it may go well when vLLM is
    asked again.
    """
    served_name = args.served_model_name is not None
    with _silence():
        drop = model_words(asker, words, args)
        kept = [word for i, word in enumerate(words) if i not in (drop or ())]
        speculative, draft, why = _draft(asker, kept, args, config)
        if drop is None:
            why = why or "no words that name the model were found"
        if not why:
            why = _difference(asker, kept, args, speculative=speculative, draft=draft)
        pinned, doubt, failed = _reread(asker, args, config)
    draft_in = _spelled_in(words, args) if speculative[:1] == [SPECULATIVE] else None
    return {
        "drop": list(drop or ()),
        "served_name": served_name,
        # Boot makes those words itself of the user's own, which no memory shall hold.
        "speculative": speculative if draft_in is None else [],
        "draft_in": draft_in,
        "pinned": pinned,
        "verified": not (why or doubt),
        "why": why or doubt,
        "failed": failed,
    }


def _reread(asker: Asker, args: argparse.Namespace, config: Any) -> tuple[list[str], str, bool]:
    """Return as `reread` of resolved_copy.py, and whether it failed.

    Nothing where the model's files are not here.
    """
    room = Path(__file__).parents[1] / "model"
    directory = args.model
    try:
        if not os.path.isdir(directory):
            directory = _by_path(room / "hub.py").snapshot(args.model, args.revision, os.environ)
        if directory is None:
            return [], "", False
        files, copies = _by_path(room / "files.py"), _beside("resolved_copy")
        pinned, doubt = copies.reread(asker.config, args, config, str(directory), files)
    except FAILURES as error:
        # The model itself was read, so that it can be served.
        return [], f"vLLM cannot read a checkpoint's files: {_last_line(str(error))}", True
    return pinned, doubt, False


def _spelled_in(words: list[str], args: argparse.Namespace) -> int | None:
    """Return the index of the word that holds the speculative config; None for one in a file."""
    for at, word in enumerate(words):
        value = word.partition("=")[2] if word.startswith("-") else word
        with contextlib.suppress(ValueError):
            if value.startswith("{") and json.loads(value) == args.speculative_config:
                return at
    return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def model_words(asker: Asker, words: list[str], args: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the indices that spell the model: none of them when it comes from a file.

    Found by leaving words out and asking what vLLM reads then.
    """
    spelled = [i for i, w in enumerate(words) if w == args.model or w.endswith(f"={args.model}")]
    candidates: list[tuple[int, ...]] = [()]
    candidates += [found for i in spelled for found in ((i,), (i - 1, i)) if min(found) >= 0]
    for candidate in candidates:
        kept = [word for i, word in enumerate(words) if i not in candidate]
        try:
            found = asker.parse([SENTINEL, *kept])
        except RejectedError:
            continue
        if found.model == SENTINEL and not _differing(found, args, {"model"}):
            return candidate
    return None


def _draft(
    asker: Asker, kept: list[str], args: argparse.Namespace, config: Any
) -> tuple[list[str], dict[str, Any] | None, str]:
    """Return the words that keep a draft's own load format, what vLLM must read, and a doubt."""
    given = getattr(args, "speculative_config", None)
    flags = [getattr(args, name, None) for name in ("spec_method", "spec_model", "spec_tokens")]
    if config.speculative_config is not None and given is None and not any(flags):
        return [], given, "the model word names a speculator, which vLLM replaces by its target"
    if _beside("resolved_key").draft_of(config) != "separate":
        return [], given, ""
    plain = {name.replace("-", "_"): value for name, value in (given or {}).items()}
    if plain.get("draft_load_config"):
        return [], given, ""
    if not hasattr(config.speculative_config, "draft_load_config"):
        return [], given, "this vLLM loads a draft model in the target's load format"
    wanted = (given or {}) | {"draft_load_config": {"load_format": "auto"}}
    for words in (
        [SPECULATIVE, json.dumps(wanted)],
        # Dotted words are merged and put last by vLLM: only another dotted one can add to them.
        ["--speculative-config.draft_load_config.load_format", "auto"],
    ):
        with contextlib.suppress(RejectedError):
            if asker.parse([SENTINEL, *kept, *words]).speculative_config == wanted:
                return words, wanted, ""
    return [], given, "the draft's load format could not be set"


def _difference(
    asker: Asker,
    kept: list[str],
    args: argparse.Namespace,
    *,
    speculative: list[str],
    draft: dict[str, Any] | None,
) -> str:
    words = [SENTINEL, *kept, "--load-format", "shardboot"]
    words += ["--model-loader-extra-config", '{"manifest":"x"}']
    if args.served_model_name is None:
        words += ["--served-model-name", "x"]
    try:
        found = asker.parse([*words, *speculative])
    except RejectedError as error:
        return f"vLLM rejects the words of a checkpoint: {error}"
    wanted = {
        "model": SENTINEL,
        "load_format": "shardboot",
        "model_loader_extra_config": {"manifest": "x"},
        "served_model_name": ["x"] if args.served_model_name is None else args.served_model_name,
        "speculative_config": draft,
    }
    wrong = [name for name, value in wanted.items() if getattr(found, name, None) != value]
    wrong += _differing(found, args, set(wanted))
    return f"vLLM would read {', '.join(wrong)} differently" if wrong else ""


def _differing(found: argparse.Namespace, wanted: argparse.Namespace, but: set[str]) -> list[str]:
    left, right = vars(found), vars(wanted)
    names = (left.keys() | right.keys()) - but - {"model_tag"}
    return sorted(n for n in names if not _same(left.get(n), right.get(n)))


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) or repr(left) == repr(right)


def _beside(name: str) -> ModuleType:
    return _by_path(Path(__file__).with_name(f"{name}.py"))


def _by_path(path: Path) -> ModuleType:
    """Return a module of ours: under -P no directory of ours is on sys.path."""
    name = f"shardboot_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not there")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _server(
    asker: Asker, words: list[str], args: argparse.Namespace, config: Any, engine: dict[str, Any]
) -> dict[str, Any]:
    """Say where HTTP is answered by all words but those that the answer is remembered without."""
    rules = _by_path(Path(__file__).parents[1] / "engine" / "words.py")
    kept = [words[i] for i in rules.kept_positions(words, engine["ignorable"])]
    with _silence(), contextlib.suppress(RejectedError):
        args = asker.parse(kept)
    answer: dict[str, Any] = _beside("resolved_key").server(config, args)
    return answer


def standing_in(args: argparse.Namespace, directory: str) -> argparse.Namespace:
    """Return `args` for the same model, its config lying in `directory`."""
    changes = dict.fromkeys(("revision", "code_revision", "tokenizer", "tokenizer_revision"))
    return argparse.Namespace(**vars(args) | changes | {"model": directory, "model_tag": None})


def answer(words: list[str], stand_in: str | None = None) -> dict[str, Any]:
    """Return the whole answer for `words`; see the module for what it never holds.

    `stand_in` is a directory with the config of a model that is not on this machine.
    """
    environ = dict(os.environ)  # as the user set it: vLLM adds to it
    # vLLM looks at its own command line, for --help and --omni.
    sys.argv = ["vllm", "serve", *words]
    asker = Asker()
    key = _beside("resolved_key")
    try:
        args = asker.parse(words)
    except RejectedError as error:
        return {"status": "rejected", "message": str(error)}
    try:
        config = asker.config(standing_in(args, stand_in) if stand_in else args)
    except RejectedError as error:
        return {"status": "rejected", "message": str(error), "model": key.model(args)}
    engine: dict[str, Any] = _beside("resolved_engine").engine(asker.serve)
    return {
        "status": "ok",
        "engine": engine,
        "words": recipe(asker, words, args, config),
        "model": key.model(args),
        "key": key.key(config, engine, environ),
        "layout": key.layout(config, args),
        "server": _server(asker, words, args, config, engine),
        "load": {
            "format": str(config.load_config.load_format),
            "extra_config": bool(args.model_loader_extra_config),
            # Of a model on the hub; nobody but vLLM looks for weights there.
            "elsewhere": bool(config.load_config.download_dir) and not os.path.isdir(args.model),
        },
        "kind": key.kind(config),
        # What it has the processes that it spawns preload.
        "preload": os.environ.get("LD_PRELOAD", ""),
    }


def main() -> None:
    """Read the request, write the answer, end without vLLM's and torch's slow good-byes."""
    # vLLM's imports make millions of objects, and next to no garbage: a fifth less time.
    gc.disable()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    request = json.load(sys.stdin)
    text = json.dumps(answer([str(word) for word in request["words"]], request.get("stand_in")))
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
