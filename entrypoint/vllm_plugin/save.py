"""The save child: build vLLM's executor on the source, and nothing more of it.

    python -P -m entrypoint.vllm_plugin.save ANSWER_FD < {"words": [...], "staging": DIR, ...}

One JSON answer: `ok` when every rank of this node left its fragment in staging; `refused` with a
reason code when the model cannot be saved. Any other end means that the save failed. The caller
may kill the whole process group at any time: staging is all that is left, and no manifest.

With `record`, the whole engine is built instead, and the source's evidence is left in staging.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import MAX_INDEX_BYTES
from entrypoint.errors import SaveError
from entrypoint.vllm_plugin import compat, engine, program, resolve, resolved_engine, resolved_key


def save(request: Mapping[str, Any]) -> program.Answer:
    """Save the model that the words name; return the answer, with the key by vLLM's own reading.

    Nothing is saved where that is not the key in the request, if it names one.
    Raises: RejectedError, SaveError when the model cannot be saved; whatever vLLM raises when it
    fails.
    """
    started = time.monotonic()
    staging = Path(request["staging"])
    records = bool(request.get("record"))
    environ = dict(os.environ)  # as boot set it: vLLM adds to it
    asker, args = parse(request["words"])
    plain = asker.config(argparse.Namespace(**vars(args)))
    key = resolved_key.key(plain, resolved_engine.engine(asker.serve), environ)
    wanted = request.get("key", key)
    if any(wanted.get(name) != value for name, value in key.items()):
        # Loading and writing the model would take its time, and come to nothing.
        return {"status": "ok", "seconds": 0.0, "bytes": 0, "key": key}
    settings = {
        "staging": str(staging),
        "size_per_file": int(request["size_per_file"]),
        "file_mode": int(request["file_mode"]),
    }
    if "state" in request:
        settings |= {"state": str(request["state"]), "boot": str(request["boot"])}
    if records:
        settings |= {"record": str(staging), "side": "source"}
    config = asker.config(from_source(asker, args, settings))
    refuse_replicas(config)
    ranks = _ranks_here(config)
    if records:
        engine.load_and_answer(config, staging, "source")
    else:
        compat.fork_workers()
        engine.load(config, staging)
    found = _collect(staging, ranks)
    return {
        "status": "ok",
        "seconds": round(time.monotonic() - started, 3),
        "bytes": sum(entry.size for fragment in found for entry in fragment.files),
        "key": key,
    }


def parse(words: list[Any]) -> tuple[resolve.Asker, argparse.Namespace]:
    """Return vLLM's own parser and what it reads in `words`. Raises: RejectedError."""
    words = [str(word) for word in words]
    sys.argv = ["vllm", "serve", *words]
    # A single rank needs no process of its own, nor another import of vLLM.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    asker = resolve.Asker()
    return asker, asker.parse(words)


def from_source(
    asker: resolve.Asker, args: argparse.Namespace, settings: Mapping[str, Any]
) -> argparse.Namespace:
    """Return `args` for loading the source through `shardboot-save`, set up by `settings`."""
    settings = {**settings, "source_format": args.load_format}
    return for_loading(asker, args, "shardboot-save", settings)


def for_loading(
    asker: resolve.Asker, args: argparse.Namespace, load_format: str, settings: Mapping[str, Any]
) -> argparse.Namespace:
    """Return the user's own arguments, but for the load format and what only serving needs."""
    plain = asker.config(argparse.Namespace(**vars(args)))
    args.load_format = load_format
    args.model_loader_extra_config = dict(settings)
    args.enforce_eager = True
    # Adapters rename and pad parameters; a server adds them to a checkpoint like to any model.
    args.enable_lora = False
    args.lora_modules = None
    # A draft is another model, with weights of its own.
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        setattr(args, name, None)
    if not resolved_key.is_moe(plain):
        for name, alone in _ALONE.items():
            if hasattr(args, name):
                setattr(args, name, alone)
    return args


_ALONE = {
    "data_parallel_size": 1,
    "data_parallel_size_local": None,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False,
}
"""Replicas of a dense model hold equal state: one of them is enough."""


def refuse_replicas(config: Any) -> None:
    """Refuse experts that replicas share out. Raises: SaveError."""
    replicas = config.parallel_config.data_parallel_size
    if replicas > 1:
        raise SaveError(
            f"{replicas} data-parallel replicas share the experts; file names know no replica",
            reason="save.data-parallel",
        )


def _ranks_here(config: Any) -> range:
    """Return the ranks whose workers run on this node."""
    parallel = config.parallel_config
    here = getattr(parallel, "local_world_size", parallel.world_size)
    first = here * getattr(parallel, "node_rank_within_dp", 0)
    return range(first, first + here)


def _collect(staging: Path, ranks: range) -> list[fragments.Fragment]:
    found = []
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError):
            data = read_bounded(staging / fragments.fragment_name(rank), MAX_INDEX_BYTES)
            found.append(fragments.decode(data))
    if len(found) != len(ranks):
        raise SaveError(f"ranks {[f.rank for f in found]} were written, expected {list(ranks)}")
    return found


if __name__ == "__main__":
    program.run(save, rejected="save.rejected")
