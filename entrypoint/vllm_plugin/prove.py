"""The proving child: load one side with a whole engine and leave its evidence.

    python -P -m entrypoint.vllm_plugin.prove ANSWER_FD < {"words": [...], "side": SIDE, ...}

`checkpoint`: the user's words with the model replaced, loaded as a server would; `control`: the
source once more, as the save loaded it, nothing written but evidence. One JSON answer: `ok`, or
`refused` with a reason code: `proof.load` is the strict loader's own disagreement. Any other end
is a failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.checkpoint.proof import Side, answers_name
from entrypoint.errors import ProofError
from entrypoint.vllm_plugin import engine, program, refusal, resolve, save


def prove(request: Mapping[str, Any]) -> program.Answer:
    """Load the side that is asked for and record it; return the answer.

    Raises: RejectedError, ProofError, SaveError when it cannot be loaded; whatever vLLM raises
    when it fails.
    """
    side: Side = request["side"]
    directory = Path(request["record"])
    _forget(directory, side)
    asker, args = save.parse(request["words"])
    settings: dict[str, Any] = {"record": str(directory), "side": side}
    if side == "checkpoint":
        args = _on_checkpoint(asker, request, args)
        settings["manifest"] = request["manifest"]
        args = save.for_loading(asker, args, "shardboot", settings)
    else:
        settings |= {"staging": str(directory), "write": False}
        args = save.from_source(asker, args, settings)
    config = asker.config(args)
    save.refuse_replicas(config)
    engine.load_and_answer(config, directory, side)
    return {"status": "ok"}


def _forget(directory: Path, side: Side) -> None:
    """Remove what an earlier attempt left, so that nobody takes it for this one's."""
    refusal.forget(directory)
    for path in [directory / answers_name(side), *directory.glob(f".{side}-rank-*.json")]:
        path.unlink(missing_ok=True)


def _on_checkpoint(
    asker: resolve.Asker, request: Mapping[str, Any], args: argparse.Namespace
) -> argparse.Namespace:
    words = [str(word) for word in request["words"]]
    drop = resolve.model_words(asker, words, args)
    if drop is None:
        raise ProofError("no words that name the model were found", reason="proof.words")
    kept = [word for i, word in enumerate(words) if i not in drop]
    return asker.parse([str(request["checkpoint"]), *kept, *request.get("append", [])])


if __name__ == "__main__":
    program.run(prove, rejected="proof.rejected")
