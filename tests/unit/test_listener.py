"""Who answers HTTP beside servers: one who is slow costs the others nothing."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from entrypoint.sidecar.listener import MOST_AT_ONCE, Listener, Page
from entrypoint.spelling import Place

BOUND = 30.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(Place("127.0.0.1", 0), {"/x": lambda: Page("here\n")})
    made.start()
    yield made
    made.shutdown()
    made.server_close()


def get(listener: Listener) -> str:
    # Our own URL: one of http.
    with urllib.request.urlopen(f"http://{listener.place}/x", timeout=BOUND) as answer:
        text: str = answer.read().decode()
        return text


def slow(listener: Listener) -> socket.socket:
    """Begin to ask, and go no further."""
    asking = socket.create_connection(listener.place)
    asking.sendall(b"GET /x HT")
    return asking


def is_ended(asking: socket.socket, seconds: float) -> bool:
    asking.settimeout(seconds)
    try:
        return not asking.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


def test_as_many_slow_ones_as_there_are_places_silence_nobody(listener: Listener) -> None:
    with ExitStack() as stack:
        asking = [stack.enter_context(slow(listener)) for _ in range(MOST_AT_ONCE)]
        began = time.monotonic()
        assert [get(listener) for _ in range(3)] == ["here\n"] * 3
        assert time.monotonic() - began < 3
        assert is_ended(asking[0], BOUND)
        assert not is_ended(asking[-1], 0.01)


def test_who_goes_on_asking_has_so_long_as_everybody_and_no_longer(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.sidecar.listener.SECONDS", 0.2)
    deadline = time.monotonic() + BOUND
    with slow(listener) as asking:
        while not is_ended(asking, 0.05):
            assert time.monotonic() < deadline
            asking.send(b"x")
    assert get(listener) == "here\n"
