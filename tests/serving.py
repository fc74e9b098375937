"""One boot of a real server, from its start to its first answer: for tests and for scripts/demo.

The standard library alone, so that scripts/demo can import it before anything is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from processes import RUN_SECONDS, Program, ProgramError

FLAGS: Final = ("--enforce-eager", "--max-model-len", "512", "--dtype", "bfloat16")
OWN_SHM: Final = (
    *("unshare", "--mount", "--propagation", "private"),
    *("sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh"),
)
"""Before a command, as root: gives it a /dev/shm of its own, where what is left can be seen."""

POLL_SECONDS: Final = 0.1
TOKENS: Final = 24
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_HELD: Final[list[socket.socket]] = []
"""What keeps the ports that were given out."""

TIERS: Final = {"save": "saved", "copy": "shared", "reuse": "local"}


@dataclass(frozen=True)
class Answer:
    """A greedy completion."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Boot:
    """One boot. `tier` is saved, local, shared or plain; seconds count from the process's start.

    `execed`: when shardboot had nothing more to do than to become vLLM.
    """

    tier: str
    reason: str
    execed: float
    healthy: float
    answered: float
    answer: Answer
    pid: int


def environment(tp: int = 1) -> dict[str, str]:
    """Return this process's environment as real vLLM on the CPU needs it, none of ours in it.

    With VLLM_PORT gone, vLLM asks the kernel for every internal port.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "SHARDBOOT"))}
    binaries = Path(sys.executable).parent
    return kept | {
        "PATH": f"{binaries}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores(tp),
        "VLLM_NO_USAGE_STATS": "1",
    }


def cores(world: int) -> str:
    """Return one core for each rank, in vLLM's words; two workers of xdist begin at two cores."""
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = os.cpu_count() or 1
    return "|".join(str((first + rank) % count) for rank in range(world))


def free_port() -> int:
    """Return a port for a server that sets SO_REUSEADDR; until it listens, who connects is refused.

    It stays bound as long as this process lives, so that nobody else is given it meanwhile.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port


class Server(Program):
    """A program that serves HTTP as vLLM does, on a free port."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start `command` with the port's words added; its output goes to `log`."""
        self.port = free_port()
        super().__init__([*command, "--host", "127.0.0.1", "--port", str(self.port)], environ, log)

    def wait_until_healthy(self, on_tick: Callable[[], None] = lambda: None) -> float:
        """Return the seconds from start until /health answers. Raises: ProgramError."""
        while True:
            on_tick()
            status = self.process.poll()
            if status is not None:
                raise ProgramError(f"ended with status {status}:\n{self.last_lines()}")
            if time.monotonic() - self.started > RUN_SECONDS:
                raise ProgramError(f"no /health in {RUN_SECONDS:.0f} s:\n{self.last_lines()}")
            if self.is_healthy():
                return time.monotonic() - self.started
            time.sleep(POLL_SECONDS)

    def is_healthy(self) -> bool:
        """Tell whether /health answers at this moment."""
        try:
            self._request("/health", None)
        except OSError:
            return False
        return True

    def complete(
        self, model: str, prompt: str, replica: int | None = None, tokens: int = TOKENS
    ) -> Answer:
        """Return the greedy completion of `prompt`, so many tokens, by a replica if one is meant.

        Raises: ProgramError.
        """
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        body = {"model": model, "prompt": prompt, "max_tokens": tokens}
        choice = self._ask("/v1/completions", body, headers)
        return Answer(tuple(choice["token_ids"]), choice["text"])

    def chat(self, model: str, content: Any) -> Answer:
        """Return the greedy reply to one message: a text, or parts. Raises: ProgramError."""
        messages = [{"role": "user", "content": content}]
        choice = self._ask("/v1/chat/completions", {"model": model, "messages": messages}, {})
        return Answer(tuple(choice["token_ids"]), choice["message"]["content"])

    def counted(self, metric: str) -> float:
        """Return the sum of a counter over all that /metrics tells apart."""
        lines = self._request("/metrics", None).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{metric}{{"))

    def _ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        greedy = {"temperature": 0, "ignore_eos": True}
        request = {"max_tokens": TOKENS, **body, **greedy, "return_token_ids": True}
        try:
            answer = json.loads(self._request(path, request, headers))
        except urllib.error.HTTPError as error:
            raise ProgramError(f"{error}: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise ProgramError(f"{error}:\n{self.last_lines()}") from None
        (choice,) = answer["choices"]
        return choice

    def _request(self, path: str, body: Any, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        # Not through a proxy, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            answer: bytes = response.read()
        return answer


def boot(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    model: str,
    prompt: str,
    hear: Callable[[str], None] = lambda _: None,
) -> Boot:
    """Start a server, wait for /health, ask it once, stop it; `hear` gets what shardboot says.

    shardboot is expected to log JSON; any other server is a plain one. Raises: ProgramError.
    """
    told = 0

    def listen() -> None:
        nonlocal told
        said = list(events(log))
        for event in said[told:]:
            hear(f"{event['event']}: {event['message']}")
        told = len(said)

    clock = time.time()
    with Server(command, environ, log) as server:
        healthy = server.wait_until_healthy(listen)
        answer = server.complete(model, prompt)
        answered = time.monotonic() - server.started
    tier, reason = decision(log)
    execed = max((event["time"] - clock for event in events(log)), default=0.0)
    return Boot(tier, reason, execed, healthy, answered, answer, server.process.pid)


def events(log: Path) -> Iterator[dict[str, Any]]:
    """Yield what shardboot said in `log`, among vLLM's own lines."""
    return events_in(log.read_text(errors="replace"))


def events_in(said: str) -> Iterator[dict[str, Any]]:
    """Yield what shardboot said, among other lines."""
    for line in said.splitlines():
        if line.startswith('{"time":'):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and {"event", "message"} <= event.keys():
                    yield event


def decision(log: Path) -> tuple[str, str]:
    """Return the tier of a boot, and the reason code of the action that it was named by."""
    steps = [event for event in events(log) if "action" in event]
    if not steps or steps[-1]["action"] != "reuse":
        return "plain", steps[-1]["event"] if steps else ""
    return TIERS[steps[0]["action"]], steps[0]["event"]
