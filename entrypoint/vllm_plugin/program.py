"""What every child program here does around its work: ask, answer, and end at once.

    python -P -m PROGRAM ANSWER_FD < REQUEST

One JSON answer: `ok`, or `refused` with a reason code. Any other end is a failure. The caller may
kill the whole process group at any time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from entrypoint.errors import ShardbootError
from entrypoint.state import process
from entrypoint.vllm_plugin.resolve import RejectedError

Answer = dict[str, Any]


def run(do: Callable[[dict[str, Any]], Answer], *, rejected: str) -> NoReturn:
    """Read the request, `do` it, answer, and end, workers and all.

    `rejected` is the reason code for words that vLLM does not accept.
    """
    process.die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        answer = do(request)
    except RejectedError as error:
        answer = {"status": "refused", "reason": rejected, "message": str(error)}
    except ShardbootError as error:
        answer = {"status": "refused", "reason": error.reason, "message": str(error)}
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's own shutdown waits for workers that have nothing left to do.
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)
