"""What an operator may do about a boot that got no checkpoint, by its reason code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OF_STORES: Final[Mapping[str, str]] = {
    "absent": "no checkpoint is there: `shardboot save` makes one, or use --on-miss save",
    "foreign": "all there are for something else: `shardboot plan` names the differing fields",
    "damaged": "its bytes are not those that were saved: `shardboot save` makes another",
    "unproved": "it waits for its proof: `shardboot prove`",
    "unproven": "it failed its proof: it waits for another vLLM, model or shardboot",
    "unfit": "vLLM's loader refused it: it waits for another vLLM, model or shardboot",
    "never-loaded": "boots died before they began to load it: see vLLM's log; the next tries again",
    "quarantined": "boots died while loading it: see vLLM's log; `shardboot unreject` tries again",
    "operator": "somebody said so: `shardboot unreject` takes it back",
    "unreachable": "the store could not be looked at: see that it is mounted and answers",
}

REMEDIES: Final[Mapping[str, str]] = {
    **{
        f"{store}.{word}": text
        for store in ("local", "shared")
        for word, text in _OF_STORES.items()
    },
    "local.unwritable": "this user may not write into the local store: give it the directory",
    "source.redirected": "a variable makes vLLM load another model: unset it to use checkpoints",
    "source.other-config": "--hf-config-path builds another model: drop it to use checkpoints",
    "load-format.user": "your words choose a loader: drop --load-format to use checkpoints",
    "engine.rejected": "vLLM does not take these words: its own message is in its log",
    "engine.noplugin": "install shardboot into the Python that runs vLLM",
    "engine.plugin-version": "install this shardboot into the Python that runs vLLM",
    "engine.words": "your words cannot be rewritten safely: spell options and values plainly",
    "engine.opaque": "name the vllm program of a Python environment with --vllm",
    "engine.failed": "vLLM did not answer: `vllm serve --help` should, as this user",
    "layout.multinode": "save and push it on one machine, with these words but those of nodes",
    "layout.dp-moe": "this layout cannot be held by a checkpoint yet: nothing to do",
    "layout.draft": "this layout cannot be held by a checkpoint yet: nothing to do",
    "source.hung": "the model's mount does not answer: see to it",
    "source.broken": "some of the model cannot be read: see to it",
    "source.absent": "the model is not on this machine: the boot after vLLM fetched it saves",
    "source.checkpoint": "the words name a checkpoint, made for something else: name the model",
    "source.holds-store": "a store lies inside the model: move it with --local-dir or --state-dir",
    "save.failed": "the log of the save, in the state directory's logs, says why",
    "save.timeout": "the save took too long: raise --save-timeout, or save beforehand",
    "save.rejected": "vLLM refused the save's words: the log of the save says why",
    "save.dtype": "this model has no state that a checkpoint can hold: nothing to do",
    "save.meta-tensor": "this model has no state that a checkpoint can hold: nothing to do",
    "save.online-quant": "quantized while loading: serve a model that is quantized already",
    "save.data-parallel": "this layout cannot be held by a checkpoint yet: nothing to do",
    "save.unproven": "it does not load to the source's state: served from the source, safely",
    "proof.words": "the proof could not be set up: its log is in the state directory's logs",
    "proof.load": "the proof's loader disagreed: its log is in the state directory's logs",
    "proof.unfinished": "nothing was found out: `shardboot prove` tries again",
    "tee.busy": "another server saves it just now: the next boot finds it",
    "space.short": "make room: `shardboot gc`, a larger --max-bytes, or a smaller reserve",
    "lock.timeout": "another process was at it for too long: `shardboot status` tells which",
    "staging.failed": "writing into the local store failed: see to its disk",
    "store.unreachable": "the store went away in the middle: see that it is mounted and answers",
    "store.absent": "what was to be copied has gone: the next boot looks again",
    "checkpoint.manifest": "its manifest cannot be read: `shardboot save` makes another",
    "checkpoint.damaged": "its bytes are not those that were saved: reject it, or take it away",
    "checkpoint.foreign": "it was made for something else: `shardboot plan` names the fields",
    "config.invalid": "a setting is wrong: the log names it",
    "access.denied": "a path is not this user's: the log names it",
    "privilege.failed": "the service user is unknown, or root could not be dropped: see --user",
    "internal.error": "a bug in shardboot: please report the trace in the log",
}
"""One line each: why, and what to do."""

UNKNOWN: Final = "docs/reasons.md has more"


def remedy(reason: str) -> str:
    """Return what to do about a refusal for `reason`."""
    return REMEDIES.get(reason, UNKNOWN)
