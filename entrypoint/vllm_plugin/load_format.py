"""The load format `shardboot`: a rank's files fit the model exactly, or no parameter is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from entrypoint.errors import DamagedError, KeyMismatchError, ShardbootError
from entrypoint.vllm_plugin import compat, refusal
from entrypoint.vllm_plugin.decisions import reproduce
from entrypoint.vllm_plugin.evidence import Recorder
from entrypoint.vllm_plugin.logical import logical_state
from entrypoint.vllm_plugin.read import Wanted, read_all
from entrypoint.vllm_plugin.strict import compare

SETTINGS = frozenset({"manifest", "boot", "state", "source", "record", "side"})

_held: list[int] = []
"""Descriptors with a shared lock on a served manifest; never closed, so that gc sees them."""


class ShardbootLoader(BaseModelLoader):
    """Loads the checkpoint in the model's directory whose manifest has the digest asked for.

    `model_loader_extra_config` is `{"manifest": DIGEST}`; boot adds `boot` and `state`, its id and
    the state directory to note in what becomes of the load, and `source`, the model's own word. A
    proof adds `record` and `side`, the directory to leave evidence or a refusal in.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        for name in sorted(settings.keys() - SETTINGS):
            raise ValueError(f"load format shardboot: unknown setting {name!r}")
        if "manifest" not in settings:
            raise ValueError("load format shardboot: missing setting 'manifest'")
        self.digest = str(settings["manifest"])
        self.manifest: Manifest | None = None
        self.recorder = Recorder.of(settings)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: a checkpoint is a local directory."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Build the very model of the save, fill it, post-process it as vLLM does."""
        if self.recorder is None:
            return self._load(vllm_config, model_config, prefix)
        try:
            model = self._load(vllm_config, model_config, prefix)
        except (ShardbootError, OSError) as error:
            _, _, rank = compat.tp_pp_rank()
            refusal.leave(self.recorder.directory, rank, "proof.load", str(error))
            raise
        self.recorder.after(model, vllm_config)
        return model

    def _load(self, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
        self.manifest = _open_manifest(Path(model_config.model), self.digest)
        reproduce(self.manifest.decisions, model_config)
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the model's parameters and buffers, rank-local, from this rank's files.

        All ranks agree before any of them writes; then all raise the same error, or none does.
        Raises: KeyMismatchError, DamagedError with nothing written; OSError, DamagedError when a
        read fails after that.
        """
        directory = Path(model_config.model)
        if self.manifest is None:
            self.manifest = _open_manifest(directory, self.digest)
        tp, pp, rank = compat.tp_pp_rank()
        state = logical_state(model)
        entries: dict[str, TensorEntry] = {}
        verdict: tuple[str, str] | None = None
        try:
            entries = compare(
                directory, self.manifest, state, layout=Layout(tp=tp, pp=pp), rank=rank
            )
        except (ShardbootError, OSError, ValueError) as error:
            foreign = isinstance(error, KeyMismatchError)
            verdict = ("foreign" if foreign else "damaged", str(error))
        _agree(verdict)
        started = time.monotonic()
        wanted = [
            Wanted(tensor, directory / entries[name].file, entries[name].begin)
            for name, tensor in state.items()
        ]
        count = read_all(wanted)
        seconds = max(time.monotonic() - started, 1e-6)
        compat.logger().info(
            "shardboot: rank %d: %d bytes read in %.2f s (%.2f GB/s)",
            rank,
            count,
            seconds,
            count / seconds / 1e9,
        )
        if self.recorder is not None:
            self.recorder.before(model)


def _agree(verdict: tuple[str, str] | None) -> None:
    """Raise on every rank what the first rank with an objection says."""
    objections = [
        (rank, *found) for rank, found in enumerate(compat.gather(verdict)) if found is not None
    ]
    if objections:
        _raise(*objections[0])


def _raise(rank: int, kind: str, message: str) -> NoReturn:
    error = KeyMismatchError if kind == "foreign" else DamagedError
    raise error(f"worker {rank} objects, and nothing was loaded: {message}")


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
