"""The save child: build vLLM's executor on the source, and nothing more of it.

    python -P -m entrypoint.vllm_plugin.save ANSWER_FD < {"words": [...], "staging": DIR, ...}

One JSON answer: `ok` when every rank of this node left its fragment in staging; `refused` with a
reason code when the model cannot be saved. Any other end means that the save failed. The caller
may kill the whole process group at any time: staging is all that is left, and no manifest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import MAX_INDEX_BYTES
from entrypoint.errors import SaveError
from entrypoint.state.files import read_json
from entrypoint.vllm_plugin import resolve, resolved_key

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the request, save, answer, and end at once, workers and all."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    request: dict[str, Any] = json.load(sys.stdin)
    staging = Path(request["staging"])
    try:
        answer = save(request, staging)
    except (resolve.RejectedError, SaveError) as error:
        reason = error.reason if isinstance(error, SaveError) else "save.rejected"
        answer = {"status": "refused", "reason": reason, "message": str(error)}
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's own shutdown waits for workers that have nothing left to do.
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def save(request: dict[str, Any], staging: Path) -> dict[str, Any]:
    """Save the model that the words name; return the answer.

    Raises: RejectedError, SaveError when the model cannot be saved; whatever vLLM raises when it
    fails.
    """
    from vllm.v1.executor.abstract import Executor

    started = time.monotonic()
    words = [str(word) for word in request["words"]]
    sys.argv = ["vllm", "serve", *words]
    # A single rank needs no process of its own, nor another import of vLLM.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    asker = resolve.Asker()
    config = asker.config(_for_saving(asker, words, request))
    _refuse_replicas(config)
    ranks = _ranks_here(config)
    executor = None
    try:
        executor = Executor.get_class(config)(config)
    finally:
        if executor is None:
            # A worker's exception arrives as another one; what it left in staging is clear.
            _raise_refusal(staging)
    found = _collect(staging, ranks)
    return {
        "status": "ok",
        "seconds": round(time.monotonic() - started, 3),
        "bytes": sum(entry.size for fragment in found for entry in fragment.files),
    }


def _for_saving(
    asker: resolve.Asker, words: list[str], request: dict[str, Any]
) -> argparse.Namespace:
    """Return the user's own arguments, but for what only serving needs."""
    args = asker.parse(words)
    plain = asker.config(argparse.Namespace(**vars(args)))
    args.model_loader_extra_config = {
        "staging": request["staging"],
        "size_per_file": int(request["size_per_file"]),
        "file_mode": int(request["file_mode"]),
        "source_format": args.load_format,
    }
    args.load_format = "shardboot-save"
    args.enforce_eager = True
    # Adapters rename and pad parameters; a server adds them to a checkpoint like to any model.
    args.enable_lora = False
    args.lora_modules = None
    if resolved_key.draft_of(plain) == "separate":
        draft = {"draft_load_config": {"load_format": "auto"}}
        args.speculative_config = (args.speculative_config or {}) | draft
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


def _refuse_replicas(config: Any) -> None:
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


def _raise_refusal(staging: Path) -> None:
    from entrypoint.vllm_plugin.save_format import refusal_name

    for path in sorted(staging.glob(refusal_name(0).replace("0", "*"))):
        said = read_json(path)
        if isinstance(said, dict):
            raise SaveError(str(said.get("message")), reason=str(said.get("reason")))


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
    main()
