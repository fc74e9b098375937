"""A proxy in front of an S3 server that answers as real storage sometimes does."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from gateway import S3

Act = Literal["slow-down", "expired", "cut", "hang", "lost"]
"""Answer so; cut the answer off in its middle; never answer; do it, and lose the answer."""

SECRET = "HUSHHUSH"  # noqa: S105 - what must not be seen

ANSWERS = {
    "slow-down": (503, "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"),
    "expired": (
        400,
        f"<Error><Code>ExpiredToken</Code><Message>Expired.</Message><Token-0>{SECRET}</Token-0>",
    ),
}


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards to `s3`, but for what `fails` says; `requests` are all, as "METHOD /path?query"."""

    daemon_threads = True

    def __init__(self, s3: S3) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.s3 = s3
        self.requests: list[str] = []
        self.released = threading.Event()
        self.fails: Callable[[str], Act | None] = lambda _: None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that gave up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Keep the tests' output clean."""

    def _answer(self) -> None:
        request = f"{self.command} {self.path}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(request)
        act = self.server.fails(request)
        if act in ANSWERS:
            status, text = ANSWERS[act]
            self._send(status, [("Content-Type", "application/xml")], text.encode(), len(text))
            return
        # After any other act the connection is good for nothing more.
        self.close_connection = self.close_connection or act is not None
        answer = None if act == "hang" else self._forward(body)
        if answer is None or act == "lost":
            self.server.released.wait()
            return
        status, headers, data = answer
        self._send(status, headers, data[: len(data) // 2] if act == "cut" else data, len(data))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - their names there

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.s3.host, self.server.s3.port)
        try:
            # With the proxy's own address in `Host`, which the client has signed.
            connection.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def proxy(s3: S3) -> Iterator[Proxy]:
    """Run a proxy; leaving the block ends it and lets go what hangs."""
    server = Proxy(s3)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def times(count: int, act: Act, part: str) -> Callable[[str], Act | None]:
    """Fail the first `count` requests that have `part` in them."""
    lock, left = threading.Lock(), [count]

    def fails(request: str) -> Act | None:
        with lock:
            if part not in request or left[0] == 0:
                return None
            left[0] -= 1
            return act

    return fails
