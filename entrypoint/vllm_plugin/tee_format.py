"""The load format `shardboot-tee`: load the source as vLLM does, and save it on the way."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.vllm_plugin import compat
from entrypoint.vllm_plugin.milestones import descent, note_steps
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.tee import Tee

SETTINGS = frozenset({"staging", "source_format", "boot", "state"})
OPTIONAL = frozenset({"fork"})
NO_NOTES = Notes(None, "")


class ShardbootTee(BaseModelLoader):
    """Loads the source; what becomes of the checkpoint, in `staging`, never changes what is served.

    A draft, and every replica but the first, is just loaded; so is a model that is loaded again.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        for name in sorted((settings.keys() - OPTIONAL) ^ SETTINGS):
            what = "unknown" if name in settings else "missing"
            raise ValueError(f"load format shardboot-tee: {what} setting {name!r}")
        self.staging = str(settings["staging"])
        self.notes = Notes.of(settings)
        self.source = compat.source_loader(load_config, settings["source_format"])
        self.tee: Tee | None = None

    def download_model(self, model_config: Any) -> None:
        self.source.download_model(model_config)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
        """Return the source's weights: vLLM asks for them where a model is loaded again."""
        return self.source.get_all_weights(model_config, model)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Load the source and post-process it as vLLM does; its state in between is saved."""
        if compat.is_draft(model_config):
            return self.source.load_model(vllm_config, model_config, prefix)
        if compat.is_first_replica(vllm_config):
            self.tee = Tee.join(self.staging, self.notes, compat.host_memory_wanted(vllm_config))
        if compat.tp_pp_rank()[2] == 0:
            note_steps(compat.worker_class(vllm_config), vllm_config, self.notes)
        tee = self.tee
        if tee is not None:
            tee.require_same_engine(vllm_config)
        model = super().load_model(vllm_config, model_config, prefix)
        if tee is not None:
            tee.record(model, vllm_config)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the source's weights; with them begins what is left of the tee."""
        tee, self.tee = self.tee, None
        if tee is not None:
            tee.examine(model)
        _, _, rank = compat.tp_pp_rank()
        notes = self.notes if rank == 0 else NO_NOTES
        notes.line("loading", **descent())
        started = time.monotonic()
        self.source.load_weights(model, model_config)
        notes.line("loaded", seconds=round(time.monotonic() - started, 3))
        if tee is not None:
            tee.take(model, model_config)
