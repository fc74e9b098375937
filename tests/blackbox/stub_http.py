"""An HTTP server where a stub's words say: on a port or a Unix socket, plain or over TLS."""

from __future__ import annotations

import argparse
import http.server
import socketserver
import ssl
import threading
from collections.abc import Callable

from answers import Answers


class Health(Answers):
    """Answers as a stub, and of its health as is due by then."""


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def listen(args: argparse.Namespace, status: Callable[[], int]) -> socketserver.TCPServer:
    """Answer in the background, as the words that were read into `args` say."""
    names = args.served_model_name or [args.model_tag or args.model]
    Health.rules = staticmethod(lambda: {"health": status(), "names": names})
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
    return server
