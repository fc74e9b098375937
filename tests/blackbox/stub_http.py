"""An HTTP server where a stub's words say: on a port or a Unix socket, plain or over TLS."""

from __future__ import annotations

import argparse
import http.server
import socketserver
import ssl
import threading
from collections.abc import Callable


class Health(http.server.BaseHTTPRequestHandler):
    """Answers `GET /health` with the status that is due by then, and nothing else."""

    status: Callable[[], int]

    def do_GET(self) -> None:
        self.send_response(type(self).status() if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def listen(args: argparse.Namespace, status: Callable[[], int]) -> None:
    """Answer in the background, as the words that were read into `args` say."""
    Health.status = staticmethod(status)
    server: socketserver.TCPServer
    if args.uds:
        server = UnixServer(args.uds, Health)
    else:
        server = http.server.ThreadingHTTPServer((args.host or "127.0.0.1", args.port), Health)
    if args.ssl_certfile:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
