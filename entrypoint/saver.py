"""Saving a checkpoint from the source: a child with vLLM's executor alone, then commit.

This room never imports torch; the child is `entrypoint.vllm_plugin.save` in vLLM's interpreter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from entrypoint import assembly, child, prover
from entrypoint.assembly import Subject
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.key import Key, differences
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.config import Settings
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import ProofError, SaveError
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.staging import Staging

SAVE_MODULE: Final = "entrypoint.vllm_plugin.save"
WITHOUT_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy would start some as soon as it is imported, and the child could not fork its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything one save needs. `words` are the user's, all after `vllm serve`.

    `boot` is the one whose ledger lines tell of it.
    """

    settings: Settings
    engine: Executable
    words: Sequence[str]
    environ: Mapping[str, str]
    resolution: Resolution
    subject: Subject
    memory: Memory
    log_file: Path
    boot: str
    proof_needed: str
    say: Callable[[str], None]
    on_progress: Callable[[int], None]


def save(order: Order, store: DirectoryStore) -> Manifest:
    """Save, verify and commit a checkpoint into `store`; return its manifest as published.

    When this raises, the store is as it was, and no process of the save is left. The child's log
    stays in `order.log_file`. Its proof included, it takes `--save-timeout` at most.
    Raises: SaveError, ProofError, StagingError, SpaceError, StoreError.
    """
    started = time.monotonic()
    deadline = started + order.settings.save_timeout
    with store.stage(order.subject.name) as staging:
        reading = assembly.Reading(order.subject, order.memory)
        reading.start()
        _run_child(order, staging)
        identity = reading.result(max(0.0, deadline - time.monotonic()))
        seconds = time.monotonic() - started
        manifest = assembly.assemble(order.subject, staging, identity, order.environ, seconds)
        if order.proof_needed:
            manifest = manifest._replace(proof=_prove(order, staging, manifest, deadline))
        result = staging.commit(manifest)
    assembly.forget_refusals(order.subject, manifest, order.settings.state_dir)
    return manifest.renamed(result.name)


def _prove(order: Order, staging: Staging, manifest: Manifest, deadline: float) -> dict[str, Json]:
    """Prove what lies in staging, before it gets a name; the loader needs a manifest for that.

    Raises: ProofError, after the key has been rejected, so that no boot tries the same again.
    """
    order.say(f"{manifest.name}: {order.proof_needed}, so it is proved before it is served")
    bench = prover.Bench(
        engine=order.engine,
        words=order.words,
        environ=order.environ,
        resolution=order.resolution,
        work=staging.path,
        logs=order.log_file.parent,
        deadline=deadline,
        say=order.say,
    )
    source = prover.read_evidence(staging.path, "source", manifest.layout.ranks)
    staging.write_file(MANIFEST, manifest.encode())
    try:
        return prover.prove(bench, staging.path, manifest, source)
    except ProofError as error:
        if error.reason == ProofError.reason:
            key = manifest.key.digest
            Rejections(order.settings.state_dir).add(key, "unproven", str(error))
        raise
    finally:
        (staging.path / MANIFEST).unlink()


def _run_child(order: Order, staging: Staging) -> None:
    settings = order.settings
    if order.proof_needed:
        environ = prover.environ_for(order.environ, "source")
    else:
        environ = with_plugin(order.environ) | WITHOUT_THREADS
    with child.open_log(order.log_file) as log:
        outcome = child.ask(
            [order.engine.interpreter, "-P", "-m", SAVE_MODULE],
            {
                "words": list(order.words),
                "key": order.subject.key.to_json(),
                "staging": str(staging.path),
                "size_per_file": settings.size_per_file,
                "file_mode": settings.file_mode,
                "record": bool(order.proof_needed),
                "state": str(settings.state_dir),
                "boot": order.boot,
            },
            environ=environ,
            log=log,
            timeout=settings.save_timeout,
            on_tick=lambda: order.on_progress(_bytes_in(staging.path)),
        )
        last_words = child.last_lines(log)
    if outcome.timed_out:
        msg = f"the save took longer than {settings.save_timeout:.0f} s and was ended"
        hint = f"see {order.log_file}, or raise --save-timeout"
        raise SaveError(msg, reason="save.timeout", hint=hint)
    answer = outcome.answer if isinstance(outcome.answer, dict) else {}
    if answer.get("status") == "refused":
        reason, message = str(answer["reason"]), str(answer["message"])
        Rejections(settings.state_dir).refuse(order.subject.key_by_config, reason, message)
        raise SaveError(message, reason=reason)
    if answer.get("status") != "ok":
        msg = f"the save child ended with status {outcome.status}: {last_words}"
        raise SaveError(msg, hint=f"its whole log is {order.log_file}")
    _require_same_key(order, answer.get("key"))


def _require_same_key(order: Order, told: Json) -> None:
    """Refuse a save by an answer that does not hold any more: its key would be another engine's.

    Raises: SaveError.
    """
    key = order.subject.key
    if not isinstance(told, dict):
        raise SaveError("the save child did not say which engine it saved for")
    found = differences(Key.from_json({**key.to_json(), **told}), key)
    if found:
        order.memory.forget("resolutions")
        said = ", ".join(f"{each.field} {each.wanted}, not {each.found}" for each in found)
        raise SaveError(f"vLLM reads the words otherwise than it was remembered to: {said}")


def _bytes_in(directory: Path) -> int:
    count = 0
    for entry in os.scandir(directory):
        # Fragments are renamed into place meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += entry.stat().st_size
    return count
