"""What vLLM decided about the model at the save, and would decide otherwise at the load.

A config may say that word embeddings are tied while the source's files hold an `lm_head`; then
vLLM unties them. It looks for that in the files of the directory it is given, so it would decide
anew, and differently, on a checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entrypoint.errors import KeyMismatchError

TIED = "tie_word_embeddings"
OUTER_TIED = "outer_tie_word_embeddings"
UNTIED_BY_FILES = "word_embeddings_untied_by_checkpoint"


def decided(model_config: Any) -> dict[str, bool]:
    """Return what vLLM ended up with: for the text config, for the outer one, and why."""
    hf_config = model_config.hf_config
    return {
        TIED: bool(getattr(hf_config.get_text_config(), "tie_word_embeddings", False)),
        OUTER_TIED: bool(getattr(hf_config, "tie_word_embeddings", False)),
        UNTIED_BY_FILES: bool(getattr(model_config, UNTIED_BY_FILES, False)),
    }


def reproduce(decisions: Mapping[str, bool], model_config: Any) -> None:
    """Make `model_config` what it was at the save, before a model is built of it.

    Raises: KeyMismatchError when a recorded decision is unknown here, or one is missing.
    """
    now = decided(model_config)
    for name in sorted(decisions.keys() ^ now.keys()):
        what = "unknown" if name in decisions else "missing"
        raise KeyMismatchError(f"manifest.json: {what} decision {name!r}")
    set_decisions(decisions, model_config)


def set_decisions(decisions: Mapping[str, bool], model_config: Any) -> None:
    """Set what differs; a config without such an attribute keeps being without it."""
    now = decided(model_config)
    hf_config = model_config.hf_config
    if now[OUTER_TIED] != decisions[OUTER_TIED]:
        hf_config.tie_word_embeddings = decisions[OUTER_TIED]
    if now[TIED] != decisions[TIED]:
        hf_config.get_text_config().tie_word_embeddings = decisions[TIED]
    if now[UNTIED_BY_FILES] != decisions[UNTIED_BY_FILES]:
        model_config.word_embeddings_untied_by_checkpoint = decisions[UNTIED_BY_FILES]
