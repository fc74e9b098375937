"""A `vllm` that a unit can run: it resolves and saves as the blackbox stub does, and serves.

    stub_server.py ROOM …    called as blackbox/stub_vllm.py is

It serves HTTP with a worker process until it is told to stop, or the worker dies; then, as vLLM, it
ends with 0.
`ROOM/rules.json` may have it die while it loads a checkpoint (`dies_loading`), or answer only
after some seconds (`warm_up`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from blackbox import stub_http, stub_vllm

from entrypoint.state.ledger import Ledger


def serve(words: list[str], rules: dict[str, Any]) -> None:
    args, _ = stub_vllm.parser().parse_known_args(words)
    if args.load_format == "shardboot" and rules.get("dies_loading"):
        told = json.loads(args.model_loader_extra_config)
        Ledger(Path(told["state"])).append({"boot": told["boot"], "event": "loading"})
        os.kill(os.getpid(), signal.SIGKILL)
    worker = subprocess.Popen(["sleep", "infinity"])

    def stop(*_: object) -> None:
        worker.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    time.sleep(rules.get("warm_up", 0))
    stub_http.listen(args, lambda: 200)
    worker.wait()
    os._exit(0)


def main() -> None:
    stub_vllm.HOUSE = Path(sys.argv[1])
    # Where it is called from must not be written to.
    stub_vllm.call = lambda name: None
    # What a standby of it forks is this server, too.
    stub_vllm.serve = lambda words, rules: serve(words[2:], rules)
    stub_vllm.main()


if __name__ == "__main__":
    main()
