"""The pipeline where all rooms meet: assess → decide → perform → hold → exec.

Root is dropped before any of it (`step_down`): whatever reads a model, asks vLLM or writes into a
store already is the service user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from entrypoint import launch, privilege
from entrypoint.assess import Assessment, assess
from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.checkpoint.finding import Complete, Damaged
from entrypoint.checkpoint.inspect import verify_deep
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import Settings
from entrypoint.engine.executable import locate, with_plugin
from entrypoint.errors import ConfigError, NotFoundError, RefusedError, ShardbootError
from entrypoint.log import Log, human_bytes
from entrypoint.plan import Action, Obstacle, Policy, Situation, decide
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.store import lock
from entrypoint.store.directory import DirectoryStore

PROGRESS_SECONDS: Final = 5.0
NEVER_FAIL_OPEN: Final = (2, 10, 60, 61)
"""Exit codes of usage, configuration and privilege: these must be mended, not survived."""


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot: what it was told, and where it keeps what must outlive it."""

    settings: Settings
    words: tuple[str, ...]
    environ: Mapping[str, str]
    log: Log

    @property
    def memory(self) -> Memory:
        """Remembered answers."""
        return Memory(self.settings.state_dir)

    @property
    def policy(self) -> Policy:
        """What the operator wants."""
        return Policy(on_miss=self.settings.on_miss, on_failure=self.settings.on_failure)

    def assess(self) -> Assessment:
        """Find out all that the decision hangs on."""
        return assess(self.settings, self.words, self.environ, self.memory, self.log)


def new_boot_id() -> str:
    """Return a name for this boot: time for people, a nonce for uniqueness."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def step_down(
    settings: Settings, environ: MutableMapping[str, str], log: Log, *, touches_store: bool = True
) -> None:
    """As root: give the service user its directories and become it. Else: change nothing.

    Without `touches_store` only the state directory is made ready.
    Raises: PrivilegeError, OwnershipError.
    """
    if not privilege.is_root():
        if settings.user is not None:
            user = privilege.resolve_user(settings.user)
            if user.uid != os.geteuid():
                log.line("user.kept", f"not root, so this stays uid {os.geteuid()}")
        return
    if settings.user is None:
        log.line("user.root", "running as root: no --user given, so vLLM runs as root too")
        return
    user = privilege.resolve_user(settings.user)

    def say(text: str) -> None:
        log.line("user.directory", text)

    if touches_store:
        privilege.prepare(settings.local_dir, user, settings.dir_mode, say)
    privilege.prepare(settings.state_dir, user, 0o750, say)
    privilege.adapt(environ, user)
    privilege.become(user)


def serve(boot: Boot) -> NoReturn:
    """Make sure of a checkpoint and become vLLM on it; or become vLLM on the source; or refuse.

    Raises: RefusedError, and whatever `assess` raises.
    """
    assessment = boot.assess()
    action, assessment = settle(boot, assessment)
    if action.kind == "refuse":
        _note(boot, assessment, action)
        raise RefusedError(action.text, reason=action.reason, code=action.exit_code)
    environ = with_plugin(boot.environ) if action.kind == "reuse" else boot.environ
    words = list(boot.words)
    if action.kind == "reuse":
        words = _held(boot, assessment, action)
    boot.log.line(action.reason, _sentence(action), action=action.kind)
    _note(boot, assessment, action)
    launch.become(assessment.engine.path, ["serve", *words], environ)


def _held(boot: Boot, assessment: Assessment, action: Action) -> list[str]:
    """Lock the checkpoint for as long as vLLM lives, and return vLLM's words for it."""
    assert action.manifest is not None
    assert action.path is not None
    assert assessment.resolution is not None
    # The descriptor is inheritable and never closed: it crosses exec on purpose.
    lock.hold_manifest(Path(action.path), action.manifest.digest)
    return launch.checkpoint_words(
        assessment.resolution, boot.words, action.path, action.manifest.digest
    )


def _sentence(action: Action) -> str:
    return f"serving the source: {action.text}" if action.kind == "serve-source" else action.text


def _note(boot: Boot, assessment: Assessment, action: Action) -> None:
    """Leave the one line that must outlive exec."""
    key = assessment.key
    entry: dict[str, Json] = {
        "boot": boot.log.boot,
        "time": round(time.time(), 3),
        "event": "attempt",
        "action": action.kind,
        "reason": action.reason,
        "checkpoint": action.manifest.name if action.manifest else None,
        "manifest": action.manifest.digest if action.manifest else None,
        "key": key.digest if key else None,
        "pid": os.getpid(),
    }
    if not Ledger(boot.settings.state_dir).append(entry):
        boot.log.line(
            "state.unwritable",
            f"{boot.settings.state_dir}: nothing can be kept there; boots will be slower",
        )


def settle(boot: Boot, assessment: Assessment) -> tuple[Action, Assessment]:
    """Take steps until there is a checkpoint to reuse, or only the source or a refusal is left."""
    while True:
        action = decide(assessment.situation, boot.policy)
        if action.kind == "reuse" and boot.settings.verify == "deep":
            found = deep_look(boot, action)
            if found is not None:
                boot.log.line("local.damaged", found.discrepancies[0])
                assessment = _with(assessment, local=found)
                continue
        if action.kind not in ("copy", "save"):
            return action, assessment
        assessment = _step(boot, assessment, action)


def deep_look(boot: Boot, action: Action) -> Damaged | None:
    """Read every byte of the checkpoint; return what is wrong with it."""
    assert action.manifest is not None
    manifest = action.manifest
    boot.log.line("verify.deep", f"reading {human_bytes(manifest.size)} of {manifest.name}")
    wrong = verify_deep(Path(str(action.path)), manifest, manifest.layout.ranks)
    return Damaged(manifest.name, wrong) if wrong else None


def _with(assessment: Assessment, **changes: object) -> Assessment:
    situation: Situation = replace(assessment.situation, **changes)  # type: ignore[arg-type]
    return replace(assessment, situation=situation)


def _step(boot: Boot, assessment: Assessment, action: Action) -> Assessment:
    """Copy or save; return the assessment with what came of it. One process a host at a time."""
    boot.log.line(action.reason, f"{action.kind}: {action.text}", action=action.kind)
    perform, failed = (copy_here, "no_copy") if action.kind == "copy" else (save_here, "no_save")
    try:
        manifest = alone(boot, assessment, action, perform)
    except ShardbootError as error:
        if error.exit_code in NEVER_FAIL_OPEN:
            raise
        boot.log.line(error.reason, f"{action.kind} failed: {error}", hint=error.hint)
        obstacle = Obstacle(error.reason, f"{action.kind} failed: {error}", error.exit_code)
        return _with(assessment, **{failed: obstacle})
    path = str(assessment.local_store.path(manifest.name))
    return _with(assessment, local=Complete(manifest, path))


def alone(
    boot: Boot,
    assessment: Assessment,
    action: Action,
    perform: Callable[[Boot, Assessment, Action], Manifest],
) -> Manifest:
    """Perform one step as the only process of this host, unless another made it meanwhile.

    The lock saves work, and nothing breaks where it lies.
    """
    resolution = assessment.resolution
    assert resolution is not None
    boot.settings.local_dir.mkdir(parents=True, exist_ok=True)
    name = digest_json([resolution.key.to_json(), resolution.model_word])[:16]
    path = boot.settings.local_dir / f".{name}.lock"

    def on_wait(text: str) -> None:
        boot.log.line("lock.wait", text)

    with lock.exclusive(path, boot.settings.save_timeout, on_wait):
        made = _made_meanwhile(boot, assessment)
        return made or perform(boot, assessment, action)


def _made_meanwhile(boot: Boot, assessment: Assessment) -> Manifest | None:
    """Look again, now that nobody else is at it."""
    before, now = assessment.situation.local, boot.assess().situation.local
    if not isinstance(now, Complete):
        return None
    if isinstance(before, Damaged) and before.name == now.manifest.name:
        # Known to be damaged by a deeper look than this one.
        return None
    boot.log.line("local.hit", f"another process has made {now.manifest.name} meanwhile")
    return now.manifest


def copy_here(boot: Boot, assessment: Assessment, action: Action) -> Manifest:
    """Copy the checkpoint that `action` names from the shared store into the local one."""
    assert assessment.shared_store is not None
    assert action.manifest is not None
    return transport(boot, assessment.shared_store, assessment.local_store, action.manifest, "copy")


def transport(
    boot: Boot,
    source: DirectoryStore,
    target: DirectoryStore,
    manifest: Manifest,
    verb: str,
) -> Manifest:
    """Copy one checkpoint between stores, verified in the stream; return it as published.

    When this raises, `target` is as it was.
    """
    from entrypoint.store import space, transfer  # noqa: PLC0415 - a hit needs neither

    entries = manifest.files_for(manifest.layout.ranks)
    total = sum(entry.size for entry in entries)
    settings = boot.settings
    space.require_room(target.root, total, settings.reserve_bytes, settings.max_bytes)
    progress = _Progress(boot.log, verb, total)
    with target.stage(manifest.name) as staging:
        transfer.copy(source, manifest.name, manifest, entries, staging, progress.add)
        result = staging.commit(manifest)
    progress.done(f"{result.name} {result.outcome} in {target.where}")
    return manifest.renamed(result.name)


def save_here(boot: Boot, assessment: Assessment, _: Action) -> Manifest:
    """Save a checkpoint from the source into the local store; publish it if so told."""
    from entrypoint import saver  # noqa: PLC0415 - a hit needs neither
    from entrypoint.store import space  # noqa: PLC0415

    resolution, settings, log = assessment.resolution, boot.settings, boot.log
    assert resolution is not None
    expected = sum(file.size for file in assessment.source.here.weights)
    space.require_room(
        assessment.local_store.root, expected, settings.reserve_bytes, settings.max_bytes
    )

    def on_progress(done: int, total: int) -> None:
        log.line("save.progress", f"{human_bytes(done)} of about {human_bytes(total)} written")

    started = time.monotonic()
    order = saver.Order(
        settings=settings,
        engine=assessment.engine,
        words=boot.words,
        environ=boot.environ,
        resolution=resolution,
        source=assessment.source.here,
        identity=assessment.source.identity,
        memory=boot.memory,
        log_file=settings.state_dir / "logs" / f"save-{log.boot}.log",
        on_progress=on_progress,
    )
    manifest = saver.save(order, assessment.local_store)
    seconds = time.monotonic() - started
    log.line("save.done", f"{manifest.name}: {human_bytes(manifest.size)} in {seconds:.1f} s")
    if settings.publish:
        _publish(boot, assessment, manifest)
    return manifest


def _publish(boot: Boot, assessment: Assessment, manifest: Manifest) -> None:
    """Push a fresh save; a failure is said and costs nothing else."""
    try:
        push(boot, assessment, manifest)
    except ShardbootError as error:
        boot.log.line("publish.failed", f"{error}", hint=error.hint)


def push(boot: Boot, assessment: Assessment, manifest: Manifest) -> Manifest:
    """Copy a local checkpoint to the shared store. Raises: ConfigError without one."""
    if assessment.shared_store is None:
        msg = "there is no shared store"
        raise ConfigError(msg, hint="set --shared")
    return transport(boot, assessment.local_store, assessment.shared_store, manifest, "push")


class _Progress:
    """Steady lines about a long copy: one every few seconds, and one at the end."""

    def __init__(self, log: Log, verb: str, total: int) -> None:
        self._log, self._verb, self._total = log, verb, total
        self._done = 0
        self._started = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Hear of `count` more bytes."""
        self._done += count
        if time.monotonic() - self._said < PROGRESS_SECONDS:
            return
        self._said = time.monotonic()
        rate = self._done / (self._said - self._started)
        left = (self._total - self._done) / rate if rate else 0
        text = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
        self._log.line(
            f"{self._verb}.progress", f"{text}, {human_bytes(rate)}/s, {left:.0f} s to go"
        )

    def done(self, text: str) -> None:
        """Say how it ended."""
        seconds = time.monotonic() - self._started
        rate = human_bytes(self._total / seconds if seconds else self._total)
        self._log.line(
            f"{self._verb}.done",
            f"{text}: {human_bytes(self._total)} in {seconds:.1f} s, {rate}/s",
        )


def fall_back(settings: Settings, words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become vLLM with the user's own words, untouched. Raises: ExecError."""
    launch.become(locate(settings.vllm, environ), ["serve", *words], environ)


def wanted_checkpoint(boot: Boot, assessment: Assessment) -> Manifest:
    """Return the local checkpoint that fits. Raises: NotFoundError saying what there is."""
    action = decide(assessment.situation, boot.policy)
    if action.kind == "reuse" and action.manifest is not None:
        return action.manifest
    msg = f"no local checkpoint fits: {action.text}"
    raise NotFoundError(msg, hint="`shardboot save` makes one")
