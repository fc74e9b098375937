"""Loading the source in the same process, where a checkpoint turned out not to be this model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from entrypoint.vllm_plugin import compat
from entrypoint.vllm_plugin.decisions import OUTER_TIED, TIED, UNTIED_BY_FILES, set_decisions


def load_from_source(
    vllm_config: Any, model_config: Any, prefix: str, source: str, before: Mapping[str, bool]
) -> torch.nn.Module:
    """Return the model as vLLM itself would load it from `source`.

    `before` is what vLLM had decided on the checkpoint's files, before any of it was undone.
    """
    with pointing_at(model_config, source):
        _decide_anew(model_config, before)
        loader = compat.source_loader(vllm_config.load_config, "auto")
        # It may name layers as the checkpoint's files do.
        vllm_config.quant_config = compat.quant_config(model_config, loader.load_config)
        model: torch.nn.Module = loader.load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
    return model


@contextmanager
def pointing_at(model_config: Any, source: str) -> Iterator[None]:
    """Let `model_config` name the source while it is loaded, and the checkpoint again after."""
    checkpoint, model_config.model = model_config.model, source
    try:
        yield
    finally:
        model_config.model = checkpoint


def _decide_anew(model_config: Any, before: Mapping[str, bool]) -> None:
    """Decide about tied embeddings as vLLM does for the source's files."""
    untied = before[UNTIED_BY_FILES]
    from_config = {
        TIED: before[TIED] or untied,
        OUTER_TIED: before[OUTER_TIED] or untied,
        UNTIED_BY_FILES: False,
    }
    set_decisions(from_config, model_config)
    if hasattr(model_config, "maybe_untie_word_embeddings"):
        model_config.maybe_untie_word_embeddings()
