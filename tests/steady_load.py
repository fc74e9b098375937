"""Clients that ask for completions again and again; each is counted, and each answer checked."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from typing import Any, Final, Self

TIMEOUT_SECONDS: Final = 120.0
PROMPT: Final = "abc abc abc"


class Load:
    """Clients of some kinds, from entering the block until `stop`.

    `fresh` ones make a connection for each request, `kept` ones keep theirs as long as it is open,
    and `stream` ones read tokens as they come. None of them asks twice for the same: what is not a
    whole answer is lost. Between two requests a client rests for some seconds.
    """

    def __init__(
        self, port: int, model: str, tokens: int, rest: float = 0.0, **clients: int
    ) -> None:
        self.port, self.model, self.tokens, self.rest = port, model, tokens, rest
        self.answered: Counter[str] = Counter()
        self.lost: list[str] = []
        self.begun = threading.Event()
        """Set whenever an answer begins."""

        self._changed = threading.Condition()
        self._over = threading.Event()
        kinds = [kind for kind, count in clients.items() for _ in range(count)]
        self._threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered, or one is lost."""
        with self._changed:
            wanted = self.answered.total() + more
            self._changed.wait_for(
                lambda: self.lost or self.answered.total() >= wanted, TIMEOUT_SECONDS
            )
            assert not self.lost, self.lost
            assert self.answered.total() >= wanted

    def stop(self) -> None:
        """Let each client finish its request; afterwards all are counted."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, kind: str) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._over.wait(self.rest):
            began = time.monotonic()
            try:
                if connection is None or is_dropped(connection):
                    connection = http.client.HTTPConnection(
                        "127.0.0.1", self.port, timeout=TIMEOUT_SECONDS
                    )
                self._check(kind, *self._request(connection, is_stream=kind == "stream"))
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                took = time.monotonic() - began
                if connection is not None:
                    connection.close()
                connection = None
                with self._changed:
                    self.lost.append(f"{kind}: {type(error).__name__}: {error} after {took:.3f} s")
                    self._changed.notify_all()
                time.sleep(0.1)  # whoever refuses is not to be asked a million times
                continue
            if kind != "kept":
                connection.close()
                connection = None
            with self._changed:
                self.answered[kind] += 1
                self._changed.notify_all()
        if connection is not None:
            connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, *, is_stream: bool
    ) -> tuple[int, bytes]:
        body: dict[str, Any] = {"model": self.model, "prompt": PROMPT, "max_tokens": self.tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": is_stream}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        self.begun.set()
        return answer.status, answer.read()

    def _check(self, kind: str, status: int, body: bytes) -> None:
        assert status == 200, f"{status}: {body[:200]!r}"
        if kind != "stream":
            (choice,) = json.loads(body)["choices"]
            assert choice["text"], body
            assert choice["finish_reason"] == "length", body
            return
        *events, end = [line for line in body.decode().splitlines() if line]
        assert end == "data: [DONE]", f"cut off: {end!r}"
        choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
        assert choices[-1][0]["finish_reason"] == "length", events[-1]
        assert "".join(each[0]["text"] for each in choices)


def is_dropped(connection: http.client.HTTPConnection) -> bool:
    """Tell whether the other side has closed it, as clients look before they use one again."""
    if connection.sock is None:
        return False  # it connects anew by itself
    connection.sock.setblocking(False)
    try:
        return connection.sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.sock.settimeout(TIMEOUT_SECONDS)
