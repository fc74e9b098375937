"""The load format `shardboot-save`: load the source as vLLM does, write this rank's logical state.

The model it returns has not been post-processed and cannot serve, unless evidence is recorded:
then vLLM goes on as with any model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.checkpoint.layout import Layout
from entrypoint.errors import SaveError
from entrypoint.vllm_plugin import compat, refusal
from entrypoint.vllm_plugin.decisions import decided
from entrypoint.vllm_plugin.evidence import Recorder
from entrypoint.vllm_plugin.logical import logical_state, refuse_unsavable
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.progress import Progress
from entrypoint.vllm_plugin.write import write_rank

WRITING = frozenset({"size_per_file", "file_mode"})
RECORDING = frozenset({"record", "side"})
NOTING = frozenset({"state", "boot"})


class ShardbootSaver(BaseModelLoader):
    """Writes the rank's shard files and fragment to `staging`; see `write_rank` for what is left.

    A refusal is left in staging too, since an exception does not survive the way from a worker.
    With `record` (a directory) and `side`, evidence for a proof is left there; with `write` false
    that is all that is left.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        self.writes = bool(settings.pop("write", True))
        expected = {"staging", "source_format"}
        expected |= WRITING if self.writes else set()
        for some in (RECORDING, NOTING):
            expected |= some if some & settings.keys() else set()
        for name in sorted(settings.keys() ^ expected):
            what = "unknown" if name in settings else "missing"
            raise ValueError(f"load format shardboot-save: {what} setting {name!r}")
        self.settings = settings
        self.staging = Path(settings["staging"])
        self.recorder = Recorder.of(settings)
        self.notes = Notes.of(settings)
        self.source = compat.source_loader(load_config, settings["source_format"])

    def download_model(self, model_config: Any) -> None:
        self.source.download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Load the source and save it; with `record`, post-process it too, and record both."""
        # Replicas of a dense model hold equal state: one writes.
        self.writes &= vllm_config.parallel_config.data_parallel_rank == 0
        try:
            if self.recorder is not None:
                model = super().load_model(vllm_config, model_config, prefix)
                self.recorder.after(model, vllm_config)
                return model
            with compat.default_dtype(model_config.dtype):
                model = compat.create_model(self, vllm_config, model_config, prefix)
                self.load_weights(model, model_config)
        except SaveError as error:
            _, _, rank = compat.tp_pp_rank()
            refusal.leave(self.staging, rank, error.reason, str(error))
            raise
        return model.eval()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the source's weights as vLLM does, then write and record the logical state."""
        refuse_unsavable(model)
        started = time.monotonic()
        self.source.load_weights(model, model_config)
        tp, pp, rank = compat.tp_pp_rank()
        if rank == 0:
            # As long as serving the source would have taken for it.
            self.notes.line("source-loaded", seconds=round(time.monotonic() - started, 3))
        if self.writes:
            self._write(model, model_config, Layout(tp=tp, pp=pp), rank)
        if self.recorder is not None:
            self.recorder.before(model)

    def _write(self, model: torch.nn.Module, model_config: Any, layout: Layout, rank: int) -> None:
        state = logical_state(model)
        progress = Progress(rank, sum(tensor.nbytes for tensor in state.values()), "written")
        fragment = write_rank(
            state,
            self.staging,
            layout=layout,
            rank=rank,
            size_per_file=int(self.settings["size_per_file"]),
            file_mode=int(self.settings["file_mode"]),
            decisions=decided(model_config),
            on_bytes=progress.heard,
        )
        progress.finished(fragment.seconds)
