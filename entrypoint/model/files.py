"""Which files of a directory are weights, which make the model what it is, and which neither.

Standard library alone: `vllm_plugin/resolve.py` reads this by its path, in an interpreter that may
not have our package.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Callable
from typing import Final

MANIFEST, INDEX, HAVE = "manifest.json", "index.json", "have.json"
"""What a checkpoint has of its own by these names; as in `checkpoint.entry`."""

PREFERRED_WEIGHTS: Final = (".safetensors",)
OTHER_WEIGHTS: Final = (".bin", ".pt", ".pth", ".gguf")
WEIGHTS: Final = (*PREFERRED_WEIGHTS, *OTHER_WEIGHTS)

NOT_FOR_VLLM: Final = (
    *(".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".mlmodel", ".ckpt", ".nemo"),
    *(".md", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp4"),
    *(".log", ".out", ".lock"),
)
"""Weights of other frameworks, what people read, and what a program writes down as it runs."""

FOR_PEOPLE: Final = ("license", "notice", "copying", "readme")

MODEL_SUFFIXES: Final = (
    *(".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml"),
    *(".vocab", ".bpe", ".spm"),
)
"""config, generation config, tokenizers of every kind, chat templates, processors, custom code."""

SMALL_BYTES: Final = 64 * 1024 * 1024
"""Up to here a file of no known kind is the model's: nobody can list what tokenizers read."""

MAX_FILES: Final = 20_000
MAX_DEPTH: Final = 16

MARKERS: Final = ("consolidated*.safetensors",)
"""Weights by whose mere presence vLLM chooses how config and tokenizer are read."""

NO_TENSORS: Final = (8).to_bytes(8, "little") + b"{}      "
"""A whole safetensors file; what a checkpoint has in a marker's place."""


def is_weights(path: str) -> bool:
    """Whether `path` holds weights in a form that vLLM loads."""
    return path.lower().endswith(WEIGHTS)


def is_model_file(directory: str, path: str) -> bool:
    """Whether what `path` in `directory` says may change what the model answers, weights aside.

    An index of weights counts: vLLM chooses shards by it. A file of no known kind does where it is
    a small one that may be read.
    """
    name = path.rpartition("/")[2].lower()
    if is_weights(path) or name in (MANIFEST, HAVE):
        return False
    if name.endswith(MODEL_SUFFIXES):
        return True
    is_other = name.endswith(NOT_FOR_VLLM) or name.startswith(FOR_PEOPLE)
    return not is_other and _is_small(os.path.join(directory, path))


def _is_small(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        # vLLM, as the same user, may not read it either.
        return False
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_BYTES


def is_copied(path: str) -> bool:
    """Whether a checkpoint carries the source's model file `path`: not an index of its weights.

    Nor what no manifest may name: nothing that vLLM looks for is called so.
    """
    name = path.rpartition("/")[2].lower()
    is_ours = name.endswith(".index.json") or name in (MANIFEST, INDEX, HAVE)
    return not is_ours and _is_plain(path)


def is_marker(path: str) -> bool:
    """Whether vLLM chooses config and tokenizer by there being weights of this name."""
    name = path.rpartition("/")[2]
    return _is_plain(path) and any(fnmatch.fnmatchcase(name, pattern) for pattern in MARKERS)


def _is_plain(path: str) -> bool:
    """Whether a manifest may name a path that `walk` returns; as `checkpoint.entry.check_path`."""
    return path.isprintable() and "\\" not in path and path.count("/") < MAX_DEPTH


def walk(directory: str, alive: Callable[[], object] = lambda: None) -> list[str]:
    """Return the paths, relative to the source, of all files that may be the model's.

    Links to directories are followed, to each once: vLLM reads what lies behind them as well.
    `alive` is called with every directory. Raises: OSError.
    """
    found: list[str] = []
    seen = {_place(directory)}
    # What lies below and may not be read, such as lost+found, vLLM does not read either.
    walk = os.walk(directory, onerror=_raise_at(directory), followlinks=True)
    for root, directories, files in walk:
        alive()
        # Hidden: .cache, .git. "original" holds the same weights in another form.
        below = sorted(d for d in directories if not d.startswith((".", "__pycache__")))
        directories.clear()
        for name in below:
            place = _place(os.path.join(root, name))
            if name != "original" and place not in seen:
                seen.add(place)
                directories.append(name)
        prefix = root[len(directory) :].lstrip("/")
        found += [os.path.join(prefix, name) for name in files if not name.startswith(".")]
        if len(found) > MAX_FILES:
            # What was left out might change unseen.
            text = f"more than {MAX_FILES} files are too many for a model"
            raise OSError(errno.EFBIG, text, directory)
    return found


def _place(directory: str) -> tuple[int, int] | None:
    """Return what a directory is, by whatever path; None where that is not told."""
    try:
        status = os.stat(directory)
    except PermissionError:
        return None
    return status.st_dev, status.st_ino


def _raise_at(top: str) -> Callable[[OSError], None]:
    def on_error(error: OSError) -> None:
        if error.filename == top or not isinstance(error, PermissionError):
            raise error

    return on_error
