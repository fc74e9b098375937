"""One question to whatever listens there, answered in time whatever that does."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.health.ask import ask
from entrypoint.health.listener import is_another, numeric
from entrypoint.state.status import Address

SECONDS = 5.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def answering(listener: socket.socket, does: Callable[[socket.socket], None]) -> Iterator[None]:
    """Answer one connection."""

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            does(connection)

    listener.listen()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(SECONDS)
        listener.close()
        assert not thread.is_alive()


def saying(data: bytes) -> Callable[[socket.socket], None]:
    def does(connection: socket.socket) -> None:
        assert connection.recv(4096).startswith(b"GET /health HTTP/1.1\r\n")
        connection.sendall(data)

    return does


def on_a_port(host: str = "127.0.0.1") -> tuple[socket.socket, Address]:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    return listener, Address(host=host, port=listener.getsockname()[1])


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (OK, 200, ""),
        (b"HTTP/1.0 200\r\n\r\n", 200, ""),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 503, "answers 503"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", 404, "answers 404"),
        (b"", None, "closed without an answer"),
        (b"SSH-2.0-x\r\n", None, "what answers does not speak HTTP"),
        (b"HTTP/1.1 2\r\n", None, "what answers does not speak HTTP"),
        (b"\0" * 9999, None, "what answers does not speak HTTP"),
    ],
)
def test_what_is_answered_is_told(data: bytes, status: int | None, text: str) -> None:
    listener, address = on_a_port()
    with answering(listener, saying(data)):
        assert ask(address, SECONDS) == (status, text, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "localhost", ""])  # noqa: S104
def test_it_is_asked_where_it_was_told_to_listen(host: str) -> None:
    listener, address = on_a_port("127.0.0.1" if host in ("localhost", "") else host)
    with answering(listener, saying(OK)):
        assert ask(address._replace(host=host), SECONDS).is_ok


def test_a_unix_socket_is_asked(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "v"))
    with answering(listener, saying(OK)):
        assert ask(Address(uds=str(tmp_path / "v")), SECONDS).is_ok


def test_nobody_there_is_told_at_once(tmp_path: Path) -> None:
    listener, address = on_a_port()  # bound as vLLM binds it, before it listens
    started = time.monotonic()
    assert ask(address, SECONDS) == (None, "Connection refused", False)
    listener.close()
    assert ask(Address(uds=str(tmp_path / "v")), SECONDS).text == "No such file or directory"
    for odd in (Address(uds="x" * 500), Address(port=99_999), Address(host="é." * 40)):
        assert not ask(odd, SECONDS).is_there
    assert time.monotonic() - started < SECONDS


def test_where_a_name_cannot_be_looked_up_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("entrypoint.health.ask._connected", connect)
    answer = ask(Address(host="llm.example.com"), SECONDS)
    assert answer == (None, "Temporary failure in name resolution", None)


def hang(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def test_one_that_hangs_or_trickles_costs_the_bound_and_no_more() -> None:
    def trickle(connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(b"H")
                time.sleep(0.01)
        except OSError:
            pass

    for does in (hang, trickle):
        listener, address = on_a_port()
        started = time.monotonic()
        with answering(listener, does):
            found = ask(address, 0.3)
            assert time.monotonic() - started < 2.0
        assert found == (None, "no answer within 0.3 s", True)


def test_one_that_takes_no_connection_is_not_there() -> None:
    listener, address = on_a_port()
    listener.listen(0)
    waiting = [socket.socket() for _ in range(2)]
    try:
        # The kernel takes one more than it was told to; the next one waits.
        waiting[0].connect((address.host, address.port))
        waiting[1].setblocking(False)
        waiting[1].connect_ex((address.host, address.port))
        assert ask(address, 0.3) == (None, "no answer within 0.3 s", False)
    finally:
        for each in (listener, *waiting):
            each.close()


def test_what_connecting_took_is_not_there_for_the_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each look at the clock finds 2.4 of the 5 seconds gone.
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 2.4).__next__)
    monkeypatch.setattr("entrypoint.health.ask.time", clock)
    listener, address = on_a_port()
    started = time.monotonic()
    with answering(listener, hang):
        assert ask(address._replace(keyfile="k"), SECONDS).status is None
        assert time.monotonic() - started < 2.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate for another name than the one that is asked, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=llm.example.com", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@contextmanager
def over_tls(pair: tuple[Path, Path], *, trusts: Path | None = None) -> Iterator[Address]:
    """Answer one connection over TLS; with `trusts`, only a client that it signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    if trusts is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusts)
    listener, address = on_a_port()

    def does(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as secured:
                saying(OK)(secured)
        except ssl.SSLError:
            pass

    with answering(listener, does):
        yield address._replace(
            certfile=str(pair[0]), keyfile=str(pair[1]), mutual=trusts is not None
        )


def test_tls_is_spoken_and_the_name_in_the_certificate_does_not_matter(
    pair: tuple[Path, Path],
) -> None:
    with over_tls(pair) as address:
        assert ask(address, SECONDS) == (200, "", True)


def test_plain_words_to_tls_and_tls_to_plain_words_are_no_health(pair: tuple[Path, Path]) -> None:
    with over_tls(pair) as address:
        assert ask(address._replace(certfile="", keyfile=""), SECONDS).status is None
    listener, address = on_a_port()
    with answering(listener, lambda connection: connection.sendall(b"HTTP/1.1 400\r\n\r\n")):
        assert ask(address._replace(keyfile="k"), SECONDS).status is None


def test_its_own_certificate_opens_a_server_that_wants_one(pair: tuple[Path, Path]) -> None:
    with over_tls(pair, trusts=pair[0]) as address:
        assert ask(address, SECONDS) == (200, "", True)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_server_that_refuses_our_certificate_is_up(
    pair: tuple[Path, Path], has_own: bool, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other"]
    command += ["-keyout", str(tmp_path / "key"), "-out", str(other)]
    subprocess.run(command, check=True, capture_output=True)
    unreadable: dict[str, Any] = (
        {} if has_own else {"certfile": "/none/such", "keyfile": "/none/such"}
    )
    with over_tls(pair, trusts=other) as address:
        found = ask(address._replace(**unreadable), SECONDS)
    assert found.is_ok
    assert "client certificate" in found.text


def test_a_server_that_closes_without_a_word_is_up_if_it_wants_a_certificate(
    pair: tuple[Path, Path],
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)

    def shake_hands(connection: socket.socket) -> None:
        # As asyncio does, and uvicorn on it, where it does not like a client's certificate.
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(4096)

    for mutual in (True, False):
        listener, address = on_a_port()
        address = address._replace(certfile="/none", keyfile="/none", mutual=mutual)
        with answering(listener, shake_hands):
            assert ask(address, SECONDS).is_ok == mutual


class Holder:
    """Another process that holds the listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.listen()
        self.process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
        )
        listener.close()


@pytest.mark.parametrize("is_unix", [False, True])
def test_another_process_on_the_port_is_told_from_ours(tmp_path: Path, is_unix: bool) -> None:
    if is_unix:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "v"))
        address = Address(uds=str(tmp_path / "v"))
    else:
        listener, address = on_a_port()
    bystander = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert not is_another(bystander.pid, address)  # bound, and nobody listens yet
    holder = Holder(listener)
    try:
        assert not is_another(holder.process.pid, address)
        assert is_another(bystander.pid, address)
        # We are its parent, as vLLM is of its API servers.
        assert not is_another(os.getpid(), address)
    finally:
        bystander.communicate()
        holder.process.communicate()
    assert not is_another(bystander.pid, address)  # gone, so nobody can tell


def test_a_server_that_was_given_a_name_is_asked_by_the_number_it_listens_on() -> None:
    listener, address = on_a_port("127.0.0.2")
    named, pid = address._replace(host="llm.example.com"), os.getpid()
    with listener:
        assert numeric(pid, named).host == "127.0.0.1"  # nobody listens yet, on no host
        listener.listen()
        assert numeric(pid, named) == address
        with socket.socket() as other:
            other.bind(("127.0.0.3", address.port))
            other.listen()
            holder = Holder(other)
            try:
                assert numeric(holder.process.pid, named).host == "127.0.0.3"
            finally:
                holder.process.communicate()
    for host in ("", "127.0.0.1", "::1"):
        assert numeric(pid, Address(host=host)).host == host
