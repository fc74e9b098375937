"""One worker of a world of several: it comes to a meeting whenever it is told to.

python meeting_child.py RANK WORLD PORT < seconds, one line a meeting; true or false for each
"""

from __future__ import annotations

import json
import sys

import torch

from entrypoint.vllm_plugin import compat


def main() -> None:
    rank, world, port = sys.argv[1:]
    # As vLLM's workers of several nodes find each other.
    place = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=place, rank=int(rank), world_size=int(world)
    )
    for line in sys.stdin:
        print(json.dumps(compat.all_come(float(line))), flush=True)


if __name__ == "__main__":
    main()
