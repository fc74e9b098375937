"""Who answers HTTP beside servers: one who is slow costs the others nothing."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from entrypoint.errors import ConfigError
from entrypoint.sidecar.bearer import Token, token_in
from entrypoint.sidecar.listener import MOST_AT_ONCE, Listener, Page, Wishes
from entrypoint.spelling import Place

BOUND = 30.0


SECRET = "0123456789abcdef-secret"  # noqa: S105 - nobody else's


@contextmanager
def listening(token: Token | None) -> Iterator[Listener]:
    wishes = Wishes({"/scrub": lambda: Page("asked for\n", 202)}, token)
    made = Listener(Place("127.0.0.1", 0), {"/x": lambda: Page("here\n")}, wishes)
    made.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening(Token(SECRET)) as made:
        yield made


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


def ask(
    listener: Listener, way: str, path: str, *, body: bytes = b"", **headers: str
) -> tuple[int, str, str]:
    """Ask in some way; return the status, what was said, and which ways are allowed."""
    connection = HTTPConnection(*listener.place, timeout=BOUND)
    with closing(connection):
        connection.request(way, path, body=body or None, headers=headers)
        answer = connection.getresponse()
        said = answer.read().decode()
        return answer.status, said, answer.getheader("Allow") or ""


def test_who_brings_the_token_may_ask_for_a_job(listener: Listener) -> None:
    for scheme in ("Bearer", "bearer"):
        asked = ask(listener, "POST", "/scrub?x", Authorization=f"{scheme} {SECRET}")
        assert asked == (202, "asked for\n", "")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        SECRET,
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}x",
    ],
)
def test_who_brings_another_may_not(listener: Listener, authorization: str) -> None:
    status, said, _ = ask(listener, "POST", "/scrub", Authorization=authorization)
    assert status == 401
    assert SECRET not in said


def test_without_a_token_nobody_may_and_it_is_said_how() -> None:
    with listening(None) as listener:
        status, said, _ = ask(listener, "POST", "/scrub", Authorization="Bearer ")
        assert status == 403
        assert "--token-file" in said


@pytest.mark.parametrize(
    ("way", "path", "expected"),
    [
        ("POST", "/x", (405, "GET")),
        ("GET", "/scrub", (405, "POST")),
        ("DELETE", "/scrub", (405, "POST")),
        ("PUT", "/x", (405, "GET")),
        ("HEAD", "/x", (405, "GET")),
        ("POST", "/y", (404, "")),
        ("GET", "/y", (404, "")),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    listener: Listener, way: str, path: str, expected: tuple[int, str]
) -> None:
    status, _, allowed = ask(listener, way, path, Authorization=f"Bearer {SECRET}")
    assert (status, allowed) == expected


def test_a_body_that_nobody_needs_costs_nobody_the_answer(listener: Listener) -> None:
    body = bytes(60_000)
    asked = ask(listener, "POST", "/scrub", body=body, Authorization=f"Bearer {SECRET}")
    assert asked[0] == 202


@pytest.mark.parametrize("last", ["à", "\xc5"])
def test_a_token_may_end_in_any_letter(last: str) -> None:
    # Whose bytes, read as Latin-1, are a blank.
    token = f"{SECRET}{last}"
    with listening(Token(token)) as listener:
        sent = f"Bearer {token} ".encode().decode("latin-1")
        assert ask(listener, "POST", "/scrub", Authorization=sent)[0] == 202


def test_a_length_that_is_no_number_of_bytes_is_none(listener: Listener) -> None:
    headers = {"Content-Length": "9" * 5000, "Authorization": f"Bearer {SECRET}"}
    asked = ask(listener, "POST", "/scrub", body=b"", **headers)
    assert asked[0] == 202


def test_a_page_that_fails_is_said_once_and_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    def fail() -> Page:
        raise ValueError("an odd ledger")

    pages = {"/x": lambda: Page("here \udcff\n"), "/odd": fail}
    made = Listener(Place("127.0.0.1", 0), pages, say=said.append)
    made.start()
    for _ in range(2):
        status, text, _ = ask(made, "GET", "/odd")
        assert (status, text) == (500, "this page failed: the sidecar's log says why\n")
    assert said == ["ValueError: an odd ledger"]
    # What cannot be said in UTF-8 is no failure.
    assert get(made) == "here ?\n"
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("content", "expected"),
    [("short\n", "16 characters"), ("", "found nothing"), ("two\nlines of text\n", "one line")],
)
def test_a_token_that_is_none_is_refused_and_not_repeated(
    tmp_path: Path, content: str, expected: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"token_file: {path}: .*{expected}") as refused:
        token_in(str(path))
    assert not content.strip() or content.strip() not in str(refused.value)
