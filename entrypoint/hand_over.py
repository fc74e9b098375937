"""The hand-over: vLLM's words and environment for what was decided, the one line, and its seat."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from entrypoint import compiled, launch, readahead
from entrypoint.assess import Assessment, Boot
from entrypoint.checkpoint.digest import Json
from entrypoint.engine.executable import with_plugin
from entrypoint.obstacles import unproved
from entrypoint.plan import Action
from entrypoint.state.attempts import TIERS
from entrypoint.state.ledger import Ledger
from entrypoint.state.status import Server
from entrypoint.store import lock

LOADED_BY_US: Final = ("reuse", "tee")
"""Actions after which our plugin is told what to load, and whether to fork."""


class Program(NamedTuple):
    """What is to run: the path of `vllm`, all words after `serve`, and the environment.

    `through` is the command that runs the script, where the kernel is not to do so itself.
    """

    path: str
    words: Sequence[str]
    environ: Mapping[str, str]
    through: Sequence[str] = ()


def prepare(boot: Boot, assessment: Assessment, action: Action) -> Program:
    """Return vLLM as it is to serve what was decided; a checkpoint is locked, and read ahead."""
    environ, words = boot.environ, list(boot.words)
    if action.kind not in LOADED_BY_US:
        return Program(assessment.engine.path, words, environ)
    environ, forks = with_plugin(environ), _forks(boot, assessment)
    if action.kind == "reuse":
        words = _held(boot, assessment, action, forks=forks)
        environ = compiled.give(boot, action, environ)
    else:
        words = _teeing(boot, assessment, action, forks=forks)
    if forks:
        environ = {**environ, **launch.preloading(assessment.resolution)}
    return Program(assessment.engine.path, words, environ, launch.quickly(assessment.engine))


def become(
    boot: Boot,
    action: Action,
    assessment: Assessment | None,
    taken: Sequence[str],
    vllm: Program,
) -> NoReturn:
    """Note what will be served, in which process, and have vLLM begin there."""
    pid = boot.seat.take(lambda text: boot.status.phase("waiting", text))
    boot.status.know(server=Server.of(pid))
    boot.status.phase("starting", **facts(action, taken))
    note(boot, action, assessment, taken)
    boot.seat.become(vllm.path, ["serve", *vllm.words], vllm.environ, boot.umask, vllm.through)


def _held(boot: Boot, assessment: Assessment, action: Action, *, forks: bool) -> list[str]:
    """Lock the checkpoint for as long as vLLM lives, and return vLLM's words for it."""
    assert action.manifest is not None
    assert action.path is not None
    assert assessment.resolution is not None
    # The descriptor is inheritable and never closed: it crosses exec on purpose.
    lock.hold_manifest(Path(action.path), action.manifest.digest)
    loader: dict[str, Json] = {
        "manifest": action.manifest.digest,
        "boot": boot.log.boot,
        "state": str(boot.settings.state_dir),
        "asked": assessment.resolution.asked,
        "threads": boot.settings.read_threads,
        "read_bytes": boot.settings.read_bytes,
    }
    if assessment.resolution.server.headless:
        loader["headless"] = True
    if assessment.situation.has_source:
        loader["source"] = assessment.source.here.directory or assessment.resolution.model_word
    if forks:
        loader["fork"] = True
    if needed := unproved(boot.settings, assessment.resolution, action.manifest):
        boot.log.line("prove", f"{action.manifest.name}: {needed}, so it is proved as it is loaded")
        loader["prove"] = True
    heir = boot.seat.heir
    keeps = boot.settings.keep_warm if heir else 0
    if boot.settings.prefetch or keeps:
        ranks, directory = assessment.resolution.ranks, Path(action.path)
        loader["reader"] = readahead.start(directory, action.manifest, ranks, heir, keeps)
    return launch.checkpoint_words(assessment.resolution, boot.words, action.path, loader)


def _forks(boot: Boot, assessment: Assessment) -> bool:
    """Whether vLLM is to import once, and fork its other processes."""
    assert assessment.resolution is not None
    resolution, wish = assessment.resolution, boot.settings.single_import
    if resolution.preload is None:
        return False
    return wish == "yes" or (wish == "auto" and resolution.key.platform.startswith("cpu"))


def _teeing(boot: Boot, assessment: Assessment, action: Action, *, forks: bool) -> list[str]:
    """Return vLLM's words for the source, saved into the staging of a tee that has begun."""
    from entrypoint import tee  # noqa: PLC0415 - a hit saves nothing

    assert action.path is not None
    assert assessment.resolution is not None
    loader = tee.loader(boot, assessment, action.path)
    if forks:
        loader["fork"] = True
    return launch.tee_words(assessment.resolution, boot.words, loader)


def facts(action: Action, taken: Sequence[str] = ()) -> dict[str, str]:
    """Return what the status says of an action: its tier is where the weights come from."""
    step = taken[-1].partition(":")[0] if taken and action.kind == "reuse" else action.kind
    return {
        "action": action.kind,
        "tier": TIERS[step],
        "reason": action.reason,
        "checkpoint": action.manifest.name if action.manifest else "",
        "ranks": action.ranks,
    }


def note(
    boot: Boot, action: Action, assessment: Assessment | None, taken: Sequence[str] = ()
) -> None:
    """Leave the one line that must outlive exec; `taken` are the steps before, by their reasons."""
    server = boot.status.status.server
    key = assessment.key if assessment else None
    entry: dict[str, Json] = {
        "boot": boot.log.boot,
        "time": round(time.time(), 3),
        "event": "attempt",
        "action": action.kind,
        "reason": action.reason,
        "after": [*taken],
        "phases": boot.status.phases,
        "checkpoint": action.manifest.name if action.manifest else None,
        "manifest": action.manifest.digest if action.manifest else None,
        "key": key.digest if key else None,
        "pid": server.pid,
        "pid_start": server.start,
        "pid_namespace": server.namespace,
        "host_boot": server.host_boot,
    }
    if assessment is not None and assessment.resolution is not None:
        entry |= {**assessment.resolution.family, "asked": assessment.resolution.asked}
    if action.ranks:
        entry["ranks"] = action.ranks
    if not (Ledger(boot.settings.state_dir).append(entry) and boot.status.is_kept):
        boot.log.line(
            "state.unwritable",
            f"{boot.settings.state_dir}: nothing can be kept there; boots will be slower",
        )
