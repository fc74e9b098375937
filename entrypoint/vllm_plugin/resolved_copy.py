"""Whether vLLM reads a checkpoint's files as it reads the model's own.

vLLM finds out much by looking at what lies in a model's directory, its weights among it: how the
config is written, which tokenizer it has, in which dtype the weights are. A checkpoint has the same
files but for the weights. So vLLM is shown such a directory, and whatever it reads differently
there is told.

Loaded by path from `resolve.py`: standard library and vLLM only.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

BY_ITS_PLACE = frozenset(
    {
        *("model", "tokenizer", "served_model_name"),
        *("revision", "code_revision", "tokenizer_revision", "_hf_config_revision"),
    }
)
"""What differs because the directory does."""

SAID_TWICE = frozenset({"hf_text_config", "model_arch_config", "_model_info"})
"""What vLLM makes of the config; that is compared itself."""

RECORDED = frozenset({"tie_word_embeddings", "word_embeddings_untied_by_checkpoint"})
"""What vLLM decides by whether there is an `lm_head` among the weights: a save records it, and a
load reproduces it (`decisions.py`)."""

BESIDE_THE_CONFIG = frozenset({"_name_or_path", "dtype", "torch_dtype"}) | RECORDED
"""Of dtypes `ModelConfig.dtype` is what counts, and compared."""


def reread(
    config_of: Callable[[argparse.Namespace], Any],
    args: argparse.Namespace,
    config: Any,
    directory: str,
    files: ModuleType,
) -> tuple[list[str], str]:
    """Return the words that a checkpoint needs beside the user's, and what is wrong even so, or "".

    `config` is what vLLM made of `args` for the model in `directory`; `files` is
    `entrypoint.model.files`. Raises: what `config_of` does, for words that vLLM rejects then.
    """
    if why := _weighed_by_tokens(config.model_config, args):
        return [], why
    wanted = facts(config)
    with laid_out(directory, files) as copy:
        there = argparse.Namespace(**vars(args) | {"model": copy, "model_tag": None})
        found, words = facts(config_of(there)), []
        if found["dtype"] != wanted["dtype"] and args.dtype == "auto":
            # The config says none, so vLLM asked the weights.
            there.dtype = str(config.model_config.dtype).removeprefix("torch.")
            found, words = facts(config_of(there)), ["--dtype", there.dtype]
    names = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    return words, f"vLLM would read {', '.join(names)} of a checkpoint differently" if names else ""


def _weighed_by_tokens(model_config: Any, args: argparse.Namespace) -> str:
    """Say so where another tokenizer than the model's own chooses what becomes of its weights.

    A classifier's may be rows of the language model's head: those of certain tokens.
    """
    configs = (model_config.hf_config, model_config.hf_text_config)
    is_own = model_config.tokenizer == model_config.model and args.tokenizer_mode == "auto"
    is_own = is_own and args.tokenizer_revision in (None, args.revision)
    if is_own or not any(getattr(found, "classifier_from_token", None) for found in configs):
        return ""
    return "the tokenizer that the words name decides about weights"


@contextmanager
def laid_out(directory: str, files: ModuleType) -> Iterator[str]:
    """Yield a directory with the files that a checkpoint of the model in `directory` would have.

    All but the shards. It has the same name: code that comes with a model is kept by that.
    """
    with tempfile.TemporaryDirectory(prefix="shardboot-copy.") as above:
        copy = Path(above, os.path.basename(os.path.abspath(directory)))
        copy.mkdir()
        for path in files.walk(directory):
            place = copy / path
            if files.is_marker(path):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(files.NO_TENSORS)
            elif files.is_model_file(directory, path) and files.is_copied(path):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(os.path.abspath(os.path.join(directory, path)))
        yield str(copy)


def facts(config: Any) -> dict[str, str]:
    """Return all that vLLM says of a model, by name, as if its directory had no place."""
    model_config = config.model_config
    found = {
        name: value
        for name, value in vars(model_config).items()
        if name not in BY_ITS_PLACE | SAID_TWICE | RECORDED
    }
    found |= {
        "tokenizer_mode": _tokenizer_mode(model_config),
        "generation_config": model_config.try_get_generation_config(),
        "architecture": model_config.architecture,
        "quantization": model_config.quantization,
    }
    place = str(model_config.model)
    texts = {name: _text(value) for name, value in found.items()}
    # A name, or a relative path, may be a word of the config as well.
    is_told = os.path.isabs(place)
    return {n: text.replace(place, "") if is_told else text for n, text in texts.items()}


def _text(value: Any) -> str:
    to_dict = getattr(value, "to_dict", None)
    if to_dict is None:
        return repr(value)
    return json.dumps(_without_place(to_dict()), sort_keys=True, default=repr)


def _without_place(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(n): v for n, v in value.items() if n not in BESIDE_THE_CONFIG}
        return {name: _without_place(item) for name, item in kept.items()}
    return [_without_place(item) for item in value] if isinstance(value, list) else value


def _tokenizer_mode(model_config: Any) -> str:
    try:
        from vllm.tokenizers.registry import tokenizer_args_from_config
    except ImportError:
        return str(model_config.tokenizer_mode)
    return str(tokenizer_args_from_config(model_config)[0])
