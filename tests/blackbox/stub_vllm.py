"""A `vllm` and the Python behind it, for tests in which vLLM's behaviour does not matter.

    stub_vllm.py HOUSE -P …/resolve.py FD                      how it reads the words
    stub_vllm.py HOUSE -P -m entrypoint.vllm_plugin.save FD    a save: real shard files, no vLLM
    stub_vllm.py HOUSE -P -m entrypoint.vllm_plugin.tune FD    what a tuning child notes, told it
    stub_vllm.py HOUSE -P -m entrypoint.vllm_plugin.standby FD NOTES WISH  the real one, of it
    stub_vllm.py HOUSE …/bin/vllm serve WORD…                  dumps what it was given, and ends;
                                                               or answers HTTP until stdin ends
    stub_vllm.py HOUSE …/uncollected.py …/bin/vllm serve WORD…  the same

`HOUSE/rules.json` says how each of them misbehaves; `HOUSE/calls` gets a line for each;
`HOUSE/events` is a FIFO that a test may wait on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from checkpoints import TENSORS, make_key, shards

from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.fragment import fragment_name
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import layout_of
from entrypoint.engine.words import kept_positions
from entrypoint.state.ledger import Ledger

IGNORABLE = {"--host": 1, "--port": 1, "--api-key": "*", "--served-model-name": "+", "--uds": 1}
IGNORABLE |= {"--ssl-certfile": 1, "--ssl-keyfile": 1}
ENV_NAMES = ["VLLM_ATTENTION_BACKEND", "VLLM_TARGET_DEVICE"]


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False, add_help=False)
    words.add_argument("model_tag", nargs="?")
    words.add_argument("--model", default="stub/default")
    words.add_argument("--tensor-parallel-size", "-tp", dest="tp", type=int, default=1)
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--nnodes", type=int, default=1)
    words.add_argument("--node-rank", type=int, default=0)
    words.add_argument("--max-model-len", type=int)
    words.add_argument("--revision")
    words.add_argument("--load-format", default="auto")
    words.add_argument("--model-loader-extra-config", default="")
    words.add_argument("--speculative-config", default="")
    words.add_argument("--host", default="")
    words.add_argument("--port", type=int, default=8000)
    words.add_argument("--uds", default="")
    words.add_argument("--ssl-certfile", default="")
    words.add_argument("--ssl-keyfile", default="")
    words.add_argument("--headless", action="store_true")
    words.add_argument("--api-key", nargs="*")
    words.add_argument("--hf-token", nargs="?")
    words.add_argument("--served-model-name", nargs="+")
    return words


def read(words: list[str]) -> argparse.Namespace:
    args = parser().parse_args(words)
    args.model = args.model_tag or args.model
    return args


def server(words: list[str]) -> dict[str, Any]:
    args = parser().parse_args(words)
    return {
        "host": args.host,
        "port": args.port,
        "takes_port": True,
        "uds": args.uds,
        "certfile": args.ssl_certfile,
        "keyfile": args.ssl_keyfile,
        "mutual": False,
        "headless": args.headless,
    }


def key_of(args: argparse.Namespace) -> Key:
    return make_key(model="", tp=args.tp, dtype=args.dtype)


def answered(key: Key) -> dict[str, Any]:
    """Return the fields that vLLM decides."""
    return {k: v for k, v in key.to_json().items() if k not in ("model", "engine", "format")}


def layout(args: argparse.Namespace) -> dict[str, Any]:
    here = args.tp // args.nnodes
    ranks = [*range(here * args.node_rank, here * (args.node_rank + 1))]
    return {"nnodes": args.nnodes, "ranks": ranks, "unplaced": "" if ranks else "it is a stub"}


def resolve(words: list[str], rules: dict[str, Any]) -> dict[str, Any]:
    try:
        args = read(words)
    except SystemExit:
        return {"status": "rejected", "message": "error: unrecognized arguments"}
    spelled = [i for i, w in enumerate(words) if w in (args.model, f"--model={args.model}")]
    if args.model_tag is None and spelled and words[spelled[0]] == args.model:
        spelled = [spelled[0] - 1, spelled[0]]
    draft = bool(args.speculative_config)
    answer: dict[str, Any] = {
        "status": "ok",
        "engine": {
            "vllm": "0.32.0",
            "torch": "2.13.0",
            "python": "3.11",
            "site_dirs": [],
            "env_names": ENV_NAMES,
            "plugin": "0.1.0",
            "ignorable": IGNORABLE,
        },
        "words": {
            "drop": spelled,
            "served_name": args.served_model_name is not None,
            "speculative": ["--draft-load-format", "auto"] if draft else [],
            "verified": True,
            "why": "",
        },
        "model": {"word": args.model, "revision": args.revision},
        "key": answered(key_of(args)),
        "layout": layout(args),
        "server": server([words[i] for i in kept_positions(words, IGNORABLE)]),
        "load": {"format": args.load_format, "extra_config": bool(args.model_loader_extra_config)},
        "kind": {"draft": "separate" if draft else "none", "moe": False},
        "preload": rules.get("preload"),
    }
    for group, changes in rules.get("change", {}).items():
        answer[group] |= changes
    return answer


def save(request: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    if "refuse" in rules:
        reason, message = rules["refuse"]
        return {"status": "refused", "reason": reason, "message": message}
    staging = Path(request["staging"])
    args = read(request["words"])
    seed = int(digest_bytes((Path(args.model) / "model.safetensors").read_bytes())[:8], 16)
    key = key_of(args)
    for rank in layout_of(key).ranks:
        if rank == rules.get("skip_rank"):
            continue
        fragment, blobs = shards(key, rank, rules.get("parts", 2), TENSORS, seed)
        for entry, blob in zip(fragment.files, blobs, strict=True):
            (staging / entry.path).write_bytes(blob[: rules.get("cut")])
            (staging / entry.path).chmod(request["file_mode"])
        (staging / fragment_name(rank)).write_bytes(rules.get("fragment", fragment.encode()))
    told = answered(key) | rules.get("reads", {})
    return {"status": "ok", "seconds": 0.1, "bytes": 1, "key": told}


def tune(request: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """Note that every size was written, and loads that took what the rules say for each."""
    if "refuse" in rules:
        reason, message = rules["refuse"]
        return {"status": "refused", "reason": reason, "message": message}
    ledger, sizes = Ledger(Path(request["staging"])), request["sizes"]
    for size in sizes:
        (Path(request["staging"]) / str(size)).mkdir()
        about: dict[str, Any] = {"boot": f"{size}", "seconds": 0.5, "files": 2, "bytes": 4096}
        ledger.append({"event": "wrote"} | about)
    for _ in range(request["runs"]):
        for size, seconds in zip(sizes, rules.get("seconds", [1.0] * len(sizes)), strict=True):
            for kind in ("cold", "warm"):
                about = {"boot": f"{size}/{kind}", "seconds": seconds, "bytes": 9}
                ledger.append({"event": "loaded"} | about)
    return {"status": "ok"}


def misbehave(rules: dict[str, Any], descriptor: int) -> None:
    """Do what the rules ask for instead of the work, if anything."""
    if "print" in rules:
        print(rules["print"], flush=True)
    if "say" in rules:
        os.write(descriptor, rules["say"].encode())
        os._exit(0)
    if "exit" in rules:
        os._exit(rules["exit"])
    if "kill" in rules:
        os.kill(os.getpid(), rules["kill"])
    if rules.get("hang"):
        hang()


def hang() -> None:
    """Stay for ever, deaf to SIGTERM, with a child that is deaf too and one that is not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = subprocess.Popen(["sleep", "1000"])
    # SIG_IGN is inherited, so only this one hears.
    heard = subprocess.Popen(["sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"])
    (HOUSE / "hanging").write_text(f"{os.getpid()} {deaf.pid} {heard.pid}")
    tell("hanging")
    deaf.wait()


def dump(words: list[str]) -> dict[str, Any]:
    # The look itself opened one descriptor that is gone when it is asked about.
    fds = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.exists(path) or os.path.islink(path):
            fds[number] = os.readlink(path)
    # A fork has no shell before it that looks.
    told = os.environ.pop("STUB_STATUS", "")
    status = dict(line.split(":\t") for line in told.splitlines())
    return {
        "argv": words,
        "pid": os.getpid(),
        "children": os.environ.pop("STUB_CHILDREN", "").split(),
        "uids": os.getresuid(),
        "gids": os.getresgid(),
        "groups": os.getgroups(),
        "cwd": os.getcwd(),
        "umask": os.umask(0),
        "is_quick": bool(os.environ.pop("STUB_QUICK", "")),
        "environ": dict(os.environ),
        "fds": fds,
        "signals": {name: int(mask, 16) for name, mask in status.items()},
    }


def tell(event: str) -> None:
    try:
        descriptor = os.open(HOUSE / "events", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nobody listens
    os.write(descriptor, f"{event}\n".encode())
    os.close(descriptor)


def call(name: str) -> None:
    descriptor = os.open(HOUSE / "calls", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, f"{name} {os.getuid()}\n".encode())
    os.close(descriptor)
    tell(name)


def serve(words: list[str], rules: dict[str, Any]) -> None:
    found = dump(words)
    call("serve")
    if rules.get("regain"):
        try:
            os.setuid(0)
            found["regained"] = True
        except OSError:
            found["regained"] = False
    temporary = HOUSE / "dumps" / f".{os.getpid()}"
    temporary.write_text(json.dumps(found))
    temporary.rename(HOUSE / "dumps" / f"{os.getpid()}.json")
    if rules.get("plugin"):
        # As vLLM does what its plugins ask for, in its first process.
        from entrypoint.vllm_plugin.reap import reap_reader

        reap_reader()
    if rules.get("orphan"):
        # In the server's session, as vLLM's workers are, if not told otherwise.
        leaves = rules["orphan"] == "in a session of its own"
        command = [rules.get("title", "sleep"), "1000"]
        program = rules.get("orphan_runs", "/bin/sleep")
        orphan = subprocess.Popen(command, executable=program, start_new_session=leaves)
        (HOUSE / "orphan").write_text(str(orphan.pid))
    if rules.get("stay"):
        tell("staying")
        sys.stdin.read()
    if "answers" in rules:
        answer_http(words, rules.get("drains"))
    for number in rules.get("ignores", []):
        signal.signal(number, signal.SIG_IGN)
    if "heeds" in rules:
        heed(rules["heeds"])
    if "kill" in rules:
        os.kill(os.getpid(), rules["kill"])
    print("this is vllm", flush=True)
    os._exit(rules.get("status", 0))


def heed(numbers: list[int]) -> None:
    """Stay until one of these signals comes, as a server does, and end with its number."""
    for number in numbers:
        signal.signal(number, lambda told, _: os._exit(told))
    tell("staying")
    while True:
        signal.pause()


def answer_http(words: list[str], drains: float | None) -> None:
    """Listen where the words say, as real vLLM would, until nobody needs this any more.

    What `drains` finishes what it has begun when it is told to stop, which takes such seconds.
    """
    from blackbox import stub_http  # dear, and few tests need it

    def status() -> int:
        found: int = json.loads((HOUSE / "rules.json").read_text())["serve"]["answers"]
        return found

    args, _ = parser().parse_known_args(words[2:])
    server = stub_http.listen(args, status)
    if drains is not None:
        drain(server, drains)
    tell("listening")
    sys.stdin.read()


def drain(server: socketserver.TCPServer, seconds: float) -> None:
    """Serve until told to stop; then listen no more, lose a worker, and take so long to end."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with subprocess.Popen(["sleep", "1000"]) as worker:
        tell("listening")
        told.wait()
        server.shutdown()
        server.server_close()
        worker.kill()
    time.sleep(seconds)
    os._exit(0)


def stand_by(told: list[str], mine: dict[str, Any]) -> None:
    """Be the real standby, that has imported this for vLLM."""
    from entrypoint.vllm_plugin import preload, standby

    preload.ensure()
    call("standby")
    if "print" in mine:
        print(mine["print"], flush=True)
    if "exit" in mine:
        os._exit(mine["exit"])
    if "gate" in mine:
        # Nobody is through before somebody opens it.
        (HOUSE / "gate").read_text()
    vllm: Any = types.ModuleType("vllm.entrypoints.cli.main")
    vllm.main = lambda: serve(sys.argv, rules_now().get("serve", {}))
    utils: Any = types.ModuleType("vllm.utils.system_utils")
    utils.get_mp_context = multiprocessing.get_context
    vllm.__file__ = str(HOUSE / "vllm.py")
    with contextlib.suppress(OSError):
        (HOUSE / "vllm.py").touch()
    platforms: Any = types.ModuleType("vllm.platforms")
    device = mine.get("device", "cpu")
    platforms.current_platform = types.SimpleNamespace(
        device_type=device, is_cpu=lambda: device == "cpu"
    )
    package = types.ModuleType("vllm")
    package.__spec__ = ModuleSpec("vllm", None)
    sys.modules |= {m.__name__: m for m in (package, vllm, utils, platforms)}
    sys.argv = ["standby", *told]
    standby.main()


def rules_now() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HOUSE / "rules.json").read_text())
    return found


def main() -> None:
    rules = rules_now()
    words = sys.argv[2:]
    if words[0].endswith("/uncollected.py"):
        os.environ["STUB_QUICK"] = "yes"
        del words[0]
    if words[0] != "-P":
        serve(words, rules.get("serve", {}))
    if "entrypoint.vllm_plugin.standby" in words:
        stand_by(words[-3:], rules.get("standby", {}))
    descriptor = int(words[-1])
    os.set_inheritable(descriptor, False)
    request = json.load(sys.stdin)
    name = "resolve"
    if "-m" in words:
        name = "tune" if "entrypoint.vllm_plugin.tune" in words else "save"
    call(name)
    mine = rules.get(name, {})
    misbehave(mine, descriptor)
    children = {"save": save, "tune": tune}
    answer = children[name](request, mine) if name in children else resolve(request["words"], mine)
    os.write(descriptor, json.dumps(answer).encode())


if __name__ == "__main__":
    HOUSE = Path(sys.argv[1])
    main()
