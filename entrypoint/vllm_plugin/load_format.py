"""The load format `shardboot`: a rank's files fit the model exactly, or no parameter is written."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from entrypoint.errors import DamagedError, KeyMismatchError
from entrypoint.vllm_plugin import compat, refusal
from entrypoint.vllm_plugin.agreement import (
    OPEN,
    STALE,
    Objection,
    agreeing,
    all_load_a_checkpoint,
    same_everywhere,
)
from entrypoint.vllm_plugin.decisions import decided, reproduce
from entrypoint.vllm_plugin.evidence import Recorder
from entrypoint.vllm_plugin.in_place import InPlace, recording, unwritten_shown
from entrypoint.vllm_plugin.logical import logical_state
from entrypoint.vllm_plugin.milestones import descent, note_steps
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.progress import SECONDS_BETWEEN_LINES, Progress
from entrypoint.vllm_plugin.quantized_layers import read_fused_names
from entrypoint.vllm_plugin.read import Reads, Wanted, read_all
from entrypoint.vllm_plugin.same_engine import require_same_engine
from entrypoint.vllm_plugin.source import load_from_source, pointing_at
from entrypoint.vllm_plugin.strict import compare

SETTINGS = frozenset(
    {
        *("manifest", "boot", "state", "asked", "headless", "source", "reader", "fork", "prove"),
        *("record", "side", "threads", "read_bytes"),
    }
)

NO_NOTES = Notes(None, "")

_held: list[int] = []
"""Descriptors with a shared lock on a served manifest; never closed, so that gc sees them."""


class ShardbootLoader(BaseModelLoader):
    """Loads the checkpoint in the model's directory whose manifest has the digest asked for.

    `model_loader_extra_config` is `{"manifest": DIGEST}`; boot adds `boot` and `state`, its id and
    the state directory to note in what becomes of the load, `asked`, a digest of what vLLM was
    asked, `headless` on a node without HTTP, and `source`, where the model can be loaded from if
    the checkpoint does not fit. With `prove` it is compared with what its source gave, before
    anything is served from it. `threads` and `read_bytes` are how it is read, where that is told.
    A proof adds `record` and `side`, the directory to leave evidence or a refusal in. `fork` and
    `reader` are for `forking` and `reap`.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        for name in sorted(settings.keys() - SETTINGS):
            raise ValueError(f"load format shardboot: unknown setting {name!r}")
        if "manifest" not in settings:
            raise ValueError("load format shardboot: missing setting 'manifest'")
        self.digest = str(settings["manifest"])
        self.source: str | None = settings.get("source")
        self.notes = Notes.of(settings)
        self.reads = _reads(settings)
        self.recorder = Recorder.of(settings)
        self.proof = InPlace.of(settings)
        self.manifest: Manifest | None = None
        self.first_here = 0
        self.loaded: dict[str, Json] = {}
        self.building = contextlib.ExitStack()

    def download_model(self, model_config: Any) -> None:
        """Do nothing: a checkpoint is a local directory."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Build the very model of the save, fill it, post-process it as vLLM does.

        Where a rank objects, nothing is served from the checkpoint: all ranks load the source
        instead, if boot told where it is, else they raise. Over several nodes the same happens
        where a node was told to load the source, or another save than the others.
        Raises: KeyMismatchError, DamagedError.
        """
        if compat.is_draft(model_config):
            # Some of vLLM's runners load a draft in the target's format, whatever they were told.
            own = compat.source_loader(self.load_config, "auto")
            return own.load_model(vllm_config, model_config, prefix)
        self.first_here = compat.first_rank_here(vllm_config)
        before = decided(model_config)
        if compat.tp_pp_rank()[2] == self.first_here:
            note_steps(compat.worker_class(vllm_config), vllm_config, self.notes)
        undo_registrations = compat.undo_registrations(vllm_config)
        try:
            over_nodes = compat.spans_nodes(vllm_config)
            if over_nodes:
                all_load_a_checkpoint()
            with agreeing():
                self.manifest = _open_manifest(Path(model_config.model), self.digest)
                reproduce(self.manifest.decisions, model_config)
            if self.recorder is None:
                # A proof's engine is not the server's: it has no draft.
                with agreeing(STALE):
                    require_same_engine(self.manifest.key, vllm_config)
            if over_nodes:
                same_everywhere(self.manifest)
            read_fused_names(vllm_config, model_config)
            return self._load(vllm_config, model_config, prefix)
        except Objection as error:
            objection = error.with_traceback(None)
            # Else what it was raised for would keep the model in its frames.
            objection.__context__ = None
        # Out of the handler: the half-built model must be gone before another one is built.
        undo_registrations()
        gc.collect()
        torch.accelerator.empty_cache()
        self._answer(objection)
        assert self.source is not None
        model = load_from_source(vllm_config, model_config, prefix, self.source, before)
        # Not before: a boot that dies of loading both counts against the checkpoint.
        if compat.tp_pp_rank()[2] == self.first_here:
            self.notes.line("fell-back")
        return model

    def _load(self, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
        """Return the model, filled and post-processed; recorded, or proved, if so told.

        Raises: Objection, on every rank the same.
        """
        with self.building:
            if self.proof is not None:
                self.building.enter_context(unwritten_shown())
            model = super().load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        if self.recorder is not None:
            self.recorder.after(model, vllm_config)
        if self.proof is not None:
            self._prove(self.proof, model, vllm_config)
        return model

    def _prove(self, proof: InPlace, model: torch.nn.Module, vllm_config: Any) -> None:
        assert self.manifest is not None
        _, _, rank = compat.tp_pp_rank()
        with agreeing(), recording():
            proof.compare(model, vllm_config, self.manifest)
        if rank == self.first_here:
            proof.keep(self.manifest)
            self.notes.line("proved")
            self.notes.line("loaded", **self.loaded)
            compat.logger().info("shardboot: %s loads to its source's state", self.manifest.name)
        # Whatever is loaded again later, as after a sleep, was proved.
        self.proof = None

    def _answer(self, objection: Objection) -> None:
        """Note the objection, and raise it where there is no source to go on with."""
        _, _, rank = compat.tp_pp_rank()
        if rank == self.first_here:
            self.notes.line("objection", text=str(objection))
            self._keep_in_mind(objection)
        if self.recorder is not None:
            refusal.leave(self.recorder.directory, rank, "proof.load", str(objection))
        if self.source is None:
            mismatch = objection.fault in ("unfit", STALE)
            error = KeyMismatchError if mismatch else DamagedError
            raise error(str(objection))
        compat.logger().error(
            "shardboot: %s. Loading the source instead: %s", objection, self.source
        )

    def _keep_in_mind(self, objection: Objection) -> None:
        """Reject the checkpoint for its own fault, or note that its proof was left open.

        Where it is another engine's, boot is to ask vLLM anew: the checkpoint is a good one.
        """
        if self.manifest is None or not (fault := objection.fault):
            return
        if fault == STALE:
            self.notes.forget_answers()
            return
        if fault == OPEN:
            if self.proof is None or self.proof.leave_open(self.manifest):
                return
            # Two loads each time, for nothing, must not go on for ever.
            fault = "unproven"
        self.notes.reject(self.manifest.content, fault, str(objection))
        if self.proof is not None:
            self.proof.give_up(self.manifest)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights that vLLM is to put into `model` again: the source's, or others'.

        vLLM lays them out as it does a model's files, which a checkpoint's are no more.
        Raises: NotImplementedError where the source is not known.
        """
        path = model_config.model
        if os.path.exists(os.path.join(path, MANIFEST)):
            if self.source is None:
                raise NotImplementedError(
                    f"{path}: a checkpoint, whose source is not at hand to reload weights from"
                )
            path = self.source
        loader = compat.source_loader(self.load_config, "auto")
        return _read_at(path, loader, model_config, model)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the model's parameters and buffers, rank-local, from this rank's files.

        All ranks agree before any of them writes. Raises: Objection, on every rank the same; with
        nothing written, unless a read failed.
        """
        if self.manifest is None:
            with agreeing():
                self.manifest = _open_manifest(Path(model_config.model), self.digest)
        # All parameters are there: what is unwritten of these is what must show.
        self.building.close()
        tp, pp, rank = compat.tp_pp_rank()
        notes = self.notes if rank == self.first_here else NO_NOTES
        notes.line("loading", **descent())
        started = time.monotonic()
        wanted = self._compare(model, Path(model_config.model), Layout(tp=tp, pp=pp), rank)
        # All ranks get on alike: one on each node tells of it.
        every = SECONDS_BETWEEN_LINES if rank == self.first_here else math.inf
        progress = Progress(rank, sum(w.tensor.nbytes for w in wanted), "read", every)
        with agreeing():
            count = read_all(wanted, progress.heard, self.reads)
        seconds = time.monotonic() - started
        self.loaded = {"seconds": round(seconds, 3), "bytes": count}
        progress.finished(seconds)
        if self.recorder is not None:
            self.recorder.before(model)
        if self.proof is not None:
            with agreeing(), recording():
                self.proof.before(model)
        else:
            notes.line("loaded", **self.loaded)

    def _compare(
        self, model: torch.nn.Module, directory: Path, layout: Layout, rank: int
    ) -> list[Wanted]:
        """Return what to read where; every rank's files fit its model exactly."""
        assert self.manifest is not None
        state = logical_state(model)
        entries: dict[str, TensorEntry] = {}
        with agreeing():
            entries = compare(directory, self.manifest, state, layout=layout, rank=rank)
        return [
            Wanted(tensor, directory / entries[name].file, entries[name].begin)
            for name, tensor in state.items()
        ]


def _read_at(
    path: str, loader: Any, model_config: Any, model: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    with pointing_at(model_config, path):
        yield from loader.get_all_weights(model_config, model)


def _reads(settings: Mapping[str, Any]) -> Reads:
    told = {"threads": settings.get("threads"), "size": settings.get("read_bytes")}
    return Reads(**{name: int(value) for name, value in told.items() if value is not None})


def _open_manifest(directory: Path, digest: str) -> Manifest:
    """Return the manifest in `directory` and keep a shared lock on it for the process's life.

    Raises: DamagedError when it is not the one asked for; ManifestError; OSError.
    """
    path = directory / MANIFEST
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # Locks save work and never carry correctness: some file systems have none.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _held.append(descriptor)
    manifest = manifests.decode(read_bounded(path, MAX_MANIFEST_BYTES))
    if manifest.digest != digest:
        raise DamagedError(
            f"{path}: expected the manifest {digest}, found {manifest.digest}",
            hint="the directory was replaced after it had been chosen",
        )
    return manifest
