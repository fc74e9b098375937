"""The pages that others read over HTTP. None of them changes anything, and none waits for a job."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from entrypoint.errors import ConfigError
from entrypoint.sidecar.threads import without_signals
from entrypoint.spelling import Place

MOST_AT_ONCE: Final = 16
SECONDS: Final = 5.0
"""How long somebody may take to ask, and to take the answer, both together."""

LEAVE_SECONDS: Final = 0.1
"""How long one who is ended takes to make place, at most."""

TEXT: Final = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """One answer."""

    text: str
    status: int = 200
    kind: str = TEXT


_GUARDS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""What a page holds is others' words: no browser shall take them for more."""

Pages = Mapping[str, Callable[[], Page]]


class Listener(ThreadingHTTPServer):
    """Answers on one place, in threads of its own.

    Where all places are taken, whoever has had one for longest makes way: an answer takes
    milliseconds, so that one is slow. Nobody keeps a place for longer than `SECONDS`.
    """

    daemon_threads = True

    def __init__(self, place: Place, pages: Pages) -> None:
        """Listen, and answer once told to `start`. Raises: ConfigError where that cannot be."""
        self.pages = pages
        self._seats = threading.BoundedSemaphore(MOST_AT_ONCE)
        # Who came when, in that order.
        self._came: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            super().__init__(place, _Asked)
        except OSError as error:
            hint = "another sidecar, or a server, has it: name another --listen"
            raise ConfigError(f"listen: {place}: {error.strerror}", hint=hint) from None

    def start(self) -> None:
        """Answer from now on, in a thread that no signal is given to."""
        with without_signals():
            threading.Thread(target=self.serve_forever, name="http", daemon=True).start()

    @property
    def place(self) -> Place:
        """Where it listens, with the port that it was given where 0 was asked for."""
        return Place(*self.socket.getsockname()[:2])

    def server_bind(self) -> None:
        """Bind; the name of the host, which its base looks up, might take a resolver's patience."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.place

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        if not self._seats.acquire(blocking=False):
            slowest = next(iter(self._came.copy()), None)
            if slowest is not None:
                _end(slowest)
            if not self._seats.acquire(timeout=LEAVE_SECONDS):
                self.shutdown_request(request)
                return
        self._came[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread is to be had.
            self._leave(request)
            raise

    def service_actions(self) -> None:
        """End whoever has taken too long, however slowly they go on; called twice a second."""
        latest = time.monotonic() - SECONDS
        for request, came in self._came.copy().items():
            if came < latest:
                _end(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the seat back when the answer is given."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        self._came.pop(request, None)
        self._seats.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who went away before they had their answer."""


def _end(request: socket.socket) -> None:
    """Have whoever reads from it, or writes to it, come to an end."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Asked(BaseHTTPRequestHandler):
    server: Listener
    server_version = "shardboot"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path, self._not_there)()
        body = page.text.encode()
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _GUARDS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _not_there(self) -> Page:
        return Page(f"expected one of: {' '.join(self.server.pages)}\n", status=404)

    def log_message(self, *_: object) -> None:
        # Probes come every few seconds.
        return
