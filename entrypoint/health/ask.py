"""One `GET /health`, on the host, port, socket and TLS that vLLM was given.

By hand, since an HTTP library takes longer to import than all else that `health` does.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import socket
import time
from contextlib import suppress
from typing import Final, NamedTuple

from entrypoint.state.status import Address

OK: Final = 200
EVERY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with
"""vLLM listens on every interface: it is asked on the one that nothing can be in the way of."""

# The key's checks cover /v1 alone, and a root path is stripped by proxies: neither is needed here.
REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MAX_LINE: Final = 1024


class Answer(NamedTuple):
    """The status of an answer, None without one; and in words what is unusual about it.

    `is_there`: somebody listens, as vLLM does once its engine is ready; None where that is not
    known, since the host's name cannot be looked up.
    """

    status: int | None
    text: str
    is_there: bool | None = True

    @property
    def is_ok(self) -> bool:
        """Whether vLLM serves."""
        return self.status == OK


def ask(address: Address, seconds: float) -> Answer:
    """Ask once, for `seconds` in all; whatever goes wrong is an answer as well.

    Looking up the name of a host alone has no bound but the resolver's own: see `listener.numeric`.
    A server that insists on a client certificate, and does not take its own, counts as serving.
    """
    deadline = time.monotonic() + seconds
    late = Answer(None, f"no answer within {seconds:g} s")
    try:
        plain = _connected(address, deadline)
    except TimeoutError:
        return late._replace(is_there=False)
    except socket.gaierror as error:
        return Answer(None, str(error.strerror), is_there=None)
    except (OSError, OverflowError, ValueError) as error:
        return Answer(None, getattr(error, "strerror", None) or str(error), is_there=False)
    try:
        with plain, _secured(plain, address, deadline) as connection:
            connection.settimeout(_left(deadline))
            connection.sendall(REQUEST)
            line = _first_line(connection, deadline)
    except TimeoutError:
        return late
    except OSError as error:
        if address.mutual and _is_refusal(error):
            return Answer(OK, "it wants a client certificate, so /health was not read")
        return Answer(None, error.strerror or str(error))
    version, _, rest = line.partition(b" ")
    status = rest[:3].decode("ascii", "replace")
    if not version.startswith(b"HTTP/") or len(status) != len("200") or not status.isdecimal():
        return Answer(None, "what answers does not speak HTTP")
    return Answer(int(status), "" if int(status) == OK else f"answers {status}")


def _is_refusal(error: Exception) -> bool:
    """Tell whether a server that was reached did not like our certificate, or that we have none."""
    import ssl  # noqa: PLC0415 - it is there by now

    # TLS 1.3 refuses after the handshake, in the middle of the question; uvicorn just closes.
    return isinstance(error, (ssl.SSLError, ConnectionResetError, BrokenPipeError))


def _left(deadline: float) -> float:
    """Return the seconds that are left. Raises: TimeoutError when none are."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _connected(address: Address, deadline: float) -> socket.socket:
    host = EVERY.get(address.host, address.host)
    # As vLLM binds: a name is an IPv4 one. `connect` takes names, without an import for them.
    family, place = (
        (socket.AF_UNIX, address.uds)
        if address.uds
        else (socket.AF_INET6 if ":" in host else socket.AF_INET, (host, address.port))
    )
    connection = socket.socket(family)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


def _secured(plain: socket.socket, address: Address, deadline: float) -> socket.socket:
    if not address.is_tls:
        return plain
    import ssl  # noqa: PLC0415 - dear, and most servers speak plain HTTP

    # Nothing secret is sent, and the certificate names what clients call, not this host's inside.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if address.mutual:
        # Where it is not ours to read, the server will say what it thinks of none.
        with suppress(OSError):
            context.load_cert_chain(address.certfile or address.keyfile, address.keyfile or None)
    plain.settimeout(_left(deadline))
    return context.wrap_socket(plain)


def _first_line(connection: socket.socket, deadline: float) -> bytes:
    data = b""
    while b"\r\n" not in data and len(data) < MAX_LINE:
        connection.settimeout(_left(deadline))
        piece = connection.recv(MAX_LINE)
        if not piece and not data:
            raise ConnectionResetError("closed without an answer")
        if not piece:
            break
        data += piece
    return data.partition(b"\r\n")[0]
