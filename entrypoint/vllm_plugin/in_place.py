"""Proving a checkpoint by the load that is to serve it, before the port opens.

Each rank compares what it has loaded with what the same rank recorded of the source, while that was
served and saved on the way: all that `evidence` knows of a rank. Tokens and logprobs are not
compared, since no engine runs yet; nor is there a second load of the source to excuse a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from entrypoint.checkpoint import proof
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ProofError
from entrypoint.state.awaited import Awaited
from entrypoint.state.proofs import Proofs
from entrypoint.vllm_plugin import compat, evidence

NO_ANSWERS: Final = b"{}"


class InPlace:
    """One rank's part of a proof in place, in one boot; `state` is the state directory."""

    def __init__(self, state: Path, boot: str) -> None:
        self.boot = boot
        self.awaited, self.proofs = Awaited(state), Proofs(state)
        self.found: evidence.Entries = {}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> InPlace | None:
        """Return what a loader's settings ask for: None without `prove`."""
        if not settings.get("prove"):
            return None
        return cls(Path(str(settings["state"])), str(settings.get("boot", "")))

    def before(self, model: torch.nn.Module) -> None:
        """Record the model between `load_weights` and post-processing."""
        self.found = evidence.before(model)

    def compare(self, model: torch.nn.Module, vllm_config: Any, manifest: Manifest) -> None:
        """Compare the post-processed model, and what `before` recorded, with the source's.

        Raises: ProofError naming what differs first; `proof.unfinished` where that is not the
        checkpoint's fault: the evidence is gone, or from other circumstances, a module does not
        answer, or, once, a table that every process recomputes. Evidence that is of no use here
        waits no longer.
        """
        _, _, rank = compat.tp_pp_rank()
        content = manifest.content
        told = self.awaited.find(content, rank)
        if told is None and self.proofs.find(manifest) is not None:
            # Another replica in this server was first.
            return
        try:
            source = _read(told)
        except ProofError:
            self.awaited.drop(content)
            msg = f"{manifest.name} cannot be proved: what its source gave is not all there"
            raise ProofError(msg, reason=proof.UNFINISHED) from None
        then, now = _circumstances(told), evidence.circumstances(vllm_config)
        if then != now:
            self.awaited.drop(content)
            msg = f"{manifest.name} cannot be proved here: recorded under {then}, and this is {now}"
            raise ProofError(msg, reason=proof.UNFINISHED)
        after = evidence.after(model, vllm_config)
        for name, entry in after.items():
            if isinstance(entry, dict) and "unprobed" in entry:
                msg = f"{manifest.name} cannot be proved: {name}: {entry['unprobed']}"
                raise ProofError(msg, reason=proof.UNFINISHED)
        found = _read({"rank": rank, "before": self.found, "after": after})
        verdict = proof.compare(source, found)
        if verdict.proves:
            return
        was_open = self.awaited.was_put_off(content, self.boot)
        is_open = proof.only_recomputed(source, found) and not was_open
        first, count = verdict.discrepancies[0], len(verdict.discrepancies)
        msg = (
            f"{manifest.name} does not load to the source's state with vLLM {manifest.key.vllm}: "
            f"{first} (one of {count})"
        )
        raise ProofError(msg, reason=proof.UNFINISHED if is_open else "")

    def leave_open(self, manifest: Manifest) -> bool:
        """Let the load of another boot try once more, and return whether none has before."""
        content = manifest.content
        if self.awaited.was_put_off(content, self.boot):
            return False
        with _said():
            self.awaited.put_off(content, self.boot)
        return True

    def give_up(self, manifest: Manifest) -> None:
        """Let a rejected checkpoint wait no longer."""
        self.awaited.drop(manifest.content)

    def keep(self, manifest: Manifest) -> None:
        """Keep the proof, once all ranks agree; where it cannot be kept, the next load proves."""
        content, vllm = manifest.content, manifest.key.vllm
        plugin = str(manifest.save.get("plugin"))
        with _said():
            source: dict[str, proof.Item] = {}
            for rank in manifest.layout.ranks:
                source |= _read(self.awaited.find(content, rank))
            kept = proof.summary(source, controlled=False, vllm=vllm, plugin=plugin)
            self.proofs.add(manifest, kept | {"in_place": True})
            self.awaited.drop(content)


def _circumstances(recorded: Json) -> Json:
    return recorded.get("circumstances") if isinstance(recorded, dict) else None


def _read(recorded: object) -> dict[str, proof.Item]:
    return proof.read([json.dumps(recorded).encode()], NO_ANSWERS)


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except (OSError, ProofError) as error:
        compat.logger().warning("shardboot: what was found out cannot be kept: %s", error)


@contextmanager
def recording() -> Iterator[None]:
    """Raise that nothing was found out, where a state could not be recorded or compared.

    Raises: ProofError, `proof.unfinished`; whatever it is, the other ranks must hear of it.
    """
    try:
        yield
    # torch has no narrower word than RuntimeError for memory that it does not get.
    except (RuntimeError, MemoryError, AssertionError, *MALFORMED) as error:
        said = str(error).partition("\n")[0][:200]
        msg = f"the state cannot be recorded: {type(error).__name__}: {said}"
        raise ProofError(msg, reason=proof.UNFINISHED) from None


@contextmanager
def unwritten_shown() -> Iterator[None]:
    """Have fresh tensors filled with NaN, or the largest number, until the block ends.

    What is not written after that would pass for the source's state by chance: often both are 0.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # Not by torch's public word, which has compiled code be another one as well.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=only_warned)
