"""Proving local checkpoints that came without a proof, while there is memory for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from entrypoint import headroom, proving
from entrypoint.assess import Assessment, Boot, assess
from entrypoint.checkpoint.finding import Rejected
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.checkpoint.proof import UNFINISHED
from entrypoint.errors import ProofError, ShardbootError
from entrypoint.log import human_bytes
from entrypoint.obstacles import unwritable
from entrypoint.sidecar.choice import to_prove
from entrypoint.sidecar.done import Done, gone_by
from entrypoint.sidecar.later import Later, in_turn
from entrypoint.sidecar.node import Node, now
from entrypoint.sidecar.view import Seen
from entrypoint.store.look import find_by_name

AGAIN_SECONDS: Final = 86_400.0
"""What came of one try comes again for as long as nothing changes."""

RANK_BYTES: Final = 3 << 30
"""What a rank takes beside its weights: vLLM itself, and a small KV cache."""

LEAST_BYTES: Final = 1 << 30
"""Where less is left while a proof goes on, somebody has come who needs it more."""

KV_CACHE: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Gigabytes: a proof has a few tokens to keep, and vLLM would take what a server does."""


class Prove:
    """The job that has vLLM load what nobody proved, as `shardboot prove` does."""

    def __init__(self, node: Node) -> None:
        self._node, self._tried = node, Done(node.boot.memory, "tried")
        self.later = Later()
        self._short: set[str] = set()
        self._asked = 0.0

    def ask(self) -> None:
        """Have all tried, however short a time ago they were."""
        self.later.forget_all()
        self._asked = now()

    def run(self) -> Iterator[float]:
        """Prove what can be. Raises: as `proving.prove_here`, but for verdicts."""
        node, wanted = self._node, self._wanted()
        if not wanted or unwritable(node.settings) is not None:
            return
        yield from in_turn(wanted, lambda each: each.content, self._prove, self.later)
        node.look()
        self._wanted()

    def _wanted(self) -> list[Seen]:
        node, latest = self._node, max(now() - AGAIN_SECONDS, gone_by(self._asked))
        here = node.seen("local")
        tried = {each.content for each in here if self._tried.when(each.content) > latest}
        wanted = to_prove(here, tried, on_accelerators=node.settings.prove_idle == "yes")
        node.sight = node.sight._replace(unproved=len(wanted))
        return wanted

    def _prove(self, wanted: Seen) -> None:
        """Prove one checkpoint, if there is memory for it, and if it needs a proof."""
        node = self._node
        manifest = find_by_name(node.local, wanted.name)
        if manifest.content != wanted.content or not self._has_memory(manifest):
            return
        # Before it begins: what ends this process would do so again and again.
        self._tried.note(manifest.content, now())
        boot = node.boot._replace(
            words=words_for(manifest), environ={**KV_CACHE, **node.boot.environ}
        )
        assessment = _assessed(boot, manifest)
        if isinstance(assessment, str):
            node.log.line("prove.skipped", f"{manifest.name}: {assessment}")
            return
        node.log.line("prove", f"{manifest.name}: nobody has proved it, and memory is free")
        try:
            proving.prove_here(boot, assessment, lambda: self._leave_if_short(manifest))
        except ProofError as error:
            if error.reason != ProofError.reason:
                raise
            node.log.line("prove.rejected", f"{error}", hint=error.hint)
            node.metrics.unproven.inc()
            return
        node.log.line("prove.done", f"{manifest.name}: loads to the source's state")
        node.metrics.proved.inc()

    def _leave_if_short(self, manifest: Manifest) -> None:
        """Give a proof up for somebody who has begun to need the memory. Raises: ProofError."""
        if (free := headroom.free_bytes()) < LEAST_BYTES:
            # To be tried again, once there is memory: nothing was found out.
            self._tried.put_off(manifest.content, 0.0)
            msg = f"{manifest.name}: given up, since {human_bytes(free)} are left to others"
            raise ProofError(msg, reason=UNFINISHED)

    def _has_memory(self, manifest: Manifest) -> bool:
        """Tell whether a load would take no memory from anybody; say once where it would."""
        needed = 2 * manifest.size + manifest.layout.world * RANK_BYTES
        if (free := headroom.free_bytes()) >= needed:
            self._short.discard(manifest.content)
            return True
        if manifest.content not in self._short:
            self._short.add(manifest.content)
            text = f"a proof takes {human_bytes(needed)}, and {human_bytes(free)} are free"
            self._node.log.line("prove.waits", f"{manifest.name}: {text}")
        return False


def _assessed(boot: Boot, manifest: Manifest) -> Assessment | str:
    """Return what vLLM makes of it, or why nothing can, or must, be proved."""
    try:
        assessment = assess(boot)
    except ShardbootError as error:
        # A sidecar without a vLLM of its own, or without the models, has other things to do.
        return str(error)
    local = assessment.situation.local
    if not isinstance(local, Rejected) or local.name != manifest.name:
        return "it needs no proof, or its key is of words that are not known here"
    # A proof loads the source as well.
    obstacle = assessment.situation.no_save
    return obstacle.text if obstacle is not None else assessment


def words_for(manifest: Manifest) -> tuple[str, ...]:
    """Return words by which vLLM comes to the key of a manifest, as far as words can be known.

    No user's words are kept anywhere. vLLM is asked what these come to, and by another key nothing
    is proved.
    """
    key, source = manifest.key, manifest.source
    words = [source.name, "--max-model-len", "auto", "--dtype", key.dtype]
    words += ["-tp", str(key.tp), "-pp", str(key.pp)]
    named = {
        "--revision": source.revision,
        "--runner": key.runner if key.runner != "generate" else None,
        # Where the model itself tells, it is not told once more.
        "--quantization": key.quantization if not key.quantization_config else None,
        "--kv-cache-dtype": key.kv_cache_dtype if key.kv_cache_dtype != "auto" else None,
        "--model-impl": key.model_impl if key.model_impl != "auto" else None,
    }
    words += [word for name, value in named.items() if value for word in (name, value)]
    return (*words, "--enable-expert-parallel") if key.ep else tuple(words)
