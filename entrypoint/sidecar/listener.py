"""What others read and ask for over HTTP. Nothing there waits for a job; jobs need the token."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from entrypoint.errors import ConfigError
from entrypoint.sidecar.bearer import Token
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
    headers: tuple[tuple[str, str], ...] = ()


_GUARDS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""What a page holds is others' words: no browser shall take them for more."""

Pages = Mapping[str, Callable[[], Page]]

MOST_BODY_BYTES: Final = 64 * 1024
"""Nobody needs to send any."""

MOST_DIGITS: Final = 18
"""Of a length that can be meant: Python itself reads no number of some thousands."""

FAILED: Final = (
    b"HTTP/1.0 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\n"
    b"this page failed: the sidecar's log says why\n"
)


class Wishes(NamedTuple):
    """What may be asked for, with POST, by whoever brings the token; None lets nobody."""

    pages: Pages = {}  # noqa: RUF012 - never changed
    token: Token | None = None


NONE: Final = Wishes()


class Listener(ThreadingHTTPServer):
    """Answers on one place, in threads of its own.

    Where all places are taken, whoever has had one for longest makes way: an answer takes
    milliseconds, so that one is slow. Nobody keeps a place for longer than `SECONDS`.
    """

    daemon_threads = True

    def __init__(
        self,
        place: Place,
        pages: Pages,
        wishes: Wishes = NONE,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Listen, and answer once told to `start`; `say` hears of pages that fail.

        Raises: ConfigError where that cannot be.
        """
        self.pages, self.wishes = pages, wishes
        self._say, self._said = say, ""
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

    def handle_error(self, request: Any, _: Any) -> None:
        """Answer that a page failed, and say so; but nothing of who has gone away before.

        What fails in the same way again is said once: probes come every few seconds.
        """
        error = sys.exception()
        if error is None or isinstance(error, OSError):
            return
        if (text := f"{type(error).__name__}: {error}") != self._said:
            self._said = text
            self._say(text)
        # Pages are made before the first byte of an answer.
        with suppress(OSError):
            request.sendall(FAILED)


def _end(request: socket.socket) -> None:
    """Have whoever reads from it, or writes to it, come to an end."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Asked(BaseHTTPRequestHandler):
    server: Listener
    server_version = "shardboot"
    sys_version = ""

    def do_GET(self) -> None:
        self._give(self.server.pages.get(self._where, self._refused)())

    def do_POST(self) -> None:
        # Unread, it would have the answer lost where the connection is closed (RFC 9112, 9.6).
        length = self.headers.get("Content-Length", "")
        is_length = length.isdecimal() and len(length) <= MOST_DIGITS
        self.rfile.read(min(int(length) if is_length else 0, MOST_BODY_BYTES))
        wish = self.server.wishes.pages.get(self._where)
        self._give(self._refused() if wish is None else self._unless_a_stranger(wish))

    def do_HEAD(self) -> None:
        self._give(self._refused())

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_HEAD  # noqa: N815 - their names there

    @property
    def _where(self) -> str:
        return self.path.partition("?")[0]

    def _unless_a_stranger(self, wish: Callable[[], Page]) -> Page:
        token = self.server.wishes.token
        if token is None:
            return Page("nobody may ask for this: start the sidecar with --token-file\n", 403)
        if not token.is_in(self.headers.get("Authorization", "")):
            how = "expected the header Authorization: Bearer, and the token in --token-file\n"
            return Page(how, 401, headers=(("WWW-Authenticate", "Bearer"),))
        return wish()

    def _refused(self) -> Page:
        """Return what is said to one who asked in a way, or for a path, that there is not."""
        ways = dict.fromkeys(self.server.pages, "GET")
        ways |= dict.fromkeys(self.server.wishes.pages, "POST")
        if (way := ways.get(self._where)) is not None:
            return Page(f"expected {way}\n", 405, headers=(("Allow", way),))
        return Page(f"expected one of: {' '.join(ways)}\n", status=404)

    def _give(self, page: Page) -> None:
        # A name may be of any bytes.
        body = page.text.encode(errors="replace")
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (*_GUARDS.items(), *page.headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        # Probes come every few seconds.
        return
