"""The load format `shardboot-save`: load the source as vLLM does, write this rank's logical state.

The model it returns has not been post-processed and cannot serve.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.checkpoint.layout import Layout
from entrypoint.errors import SaveError
from entrypoint.state.files import write_atomically
from entrypoint.vllm_plugin import compat
from entrypoint.vllm_plugin.decisions import decided
from entrypoint.vllm_plugin.logical import logical_state, refuse_unsavable
from entrypoint.vllm_plugin.write import write_rank

SETTINGS = frozenset({"staging", "size_per_file", "file_mode", "source_format"})
SECONDS_BETWEEN_LINES = 5.0


def refusal_name(rank: int) -> str:
    """Return the name under which a rank says in staging why it will not save."""
    return f".refused-{rank}.json"


class ShardbootSaver(BaseModelLoader):
    """Writes the rank's shard files and fragment to `staging`; see `write_rank` for what is left.

    A refusal is left in staging too, since an exception does not survive the way from a worker.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        for name in sorted(settings.keys() ^ SETTINGS):
            what = "unknown" if name in settings else "missing"
            raise ValueError(f"load format shardboot-save: {what} setting {name!r}")
        self.staging = Path(settings["staging"])
        self.size_per_file = int(settings["size_per_file"])
        self.file_mode = int(settings["file_mode"])
        self.source = compat.source_loader(load_config, settings["source_format"])

    def download_model(self, model_config: Any) -> None:
        self.source.download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        self.source.load_weights(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Load the source, save it, return the model without post-processing."""
        tp, pp, rank = compat.tp_pp_rank()
        with compat.default_dtype(model_config.dtype):
            model = compat.create_model(self, vllm_config, model_config, prefix)
            try:
                refuse_unsavable(model)
                self.load_weights(model, model_config)
                if vllm_config.parallel_config.data_parallel_rank == 0:
                    self._write(model, model_config, Layout(tp=tp, pp=pp), rank)
            except SaveError as error:
                said = {"reason": error.reason, "message": str(error)}
                write_atomically(self.staging / refusal_name(rank), json.dumps(said).encode())
                raise
        return model.eval()

    def _write(self, model: torch.nn.Module, model_config: Any, layout: Layout, rank: int) -> None:
        state = logical_state(model)
        progress = _Progress(rank, sum(tensor.nbytes for tensor in state.values()))
        fragment = write_rank(
            state,
            self.staging,
            layout=layout,
            rank=rank,
            size_per_file=self.size_per_file,
            file_mode=self.file_mode,
            decisions=decided(model_config),
            on_bytes=progress.heard,
        )
        progress.say(f"written in {fragment.seconds:.1f} s")


class _Progress:
    """Says every few seconds how much of a rank is written."""

    def __init__(self, rank: int, total: int) -> None:
        self.rank, self.total, self.done = rank, total, 0
        self.last = time.monotonic()
        self.logger = compat.logger()

    def heard(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say("so far")

    def say(self, what: str) -> None:
        self.logger.info(
            "shardboot: rank %d: %d of %d bytes %s", self.rank, self.done, self.total, what
        )
