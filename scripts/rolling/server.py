"""What a vLLM says over HTTP: whether it is well, what it serves, and how busy it is."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any, Final

from rolling.command import StepError, one_line

LOOK_SECONDS: Final = 5.0
COMPLETION_SECONDS: Final = 300.0
"""The first one may have to compile."""

PROMPT: Final = "The first word"
TOKENS: Final = 8
LOAD: Final = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


class Server:
    """One server, or what balances the load over some; with the API key that it wants, if any."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # Never through a proxy that the environment names: it is asked itself.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_healthy(self) -> bool:
        """Tell whether /health answers with 200, within five seconds."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._get("/health")
            return True
        return False

    def load(self) -> float | None:
        """Return how many requests run or wait by its own metrics; None if it does not tell."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            found = LOAD.findall(self._get("/metrics").decode(errors="replace"))
            return sum(map(float, found)) if found else None
        return None

    def names(self) -> list[str]:
        """Return the names that requests may ask for. Raises: StepError."""
        answer = self._ask("/v1/models", None, LOOK_SECONDS)
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (TypeError, KeyError):
            raise StepError(f"{self.url}/v1/models: no list of models: {_shown(answer)}") from None

    def complete(self, name: str) -> str:
        """Return what the model of that name has to say, never nothing. Raises: StepError."""
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        answer = self._ask("/v1/completions", body | {"temperature": 0}, COMPLETION_SECONDS)
        try:
            text = answer["choices"][0]["text"]
        except (TypeError, KeyError, IndexError):
            text = None
        if not isinstance(text, str) or not text:
            raise StepError(f"{self.url}/v1/completions: no text: {_shown(answer)}")
        return text

    def _ask(self, path: str, body: object, seconds: float) -> Any:
        url = f"{self.url}{path}"
        try:
            return json.loads(self._get(path, body, seconds))
        except urllib.error.HTTPError as error:
            with error:
                said = one_line(error.read(4096).decode(errors="replace"))
            raise StepError(f"{url}: status {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            raise StepError(f"{url}: {one_line(str(error))}") from None
        except ValueError:
            raise StepError(f"{url}: not JSON") from None

    def _get(self, path: str, body: object = None, seconds: float = LOOK_SECONDS) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url}{path}"
        # Our own URL, or the operator's.
        request = urllib.request.Request(url, data=data, headers=self._headers)  # noqa: S310
        with self._opener.open(request, timeout=seconds) as answer:
            found: bytes = answer.read()
        return found


def is_taken(address: str) -> bool:
    """Tell whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), LOOK_SECONDS):
        return True
    return False


def _shown(answer: object) -> str:
    return one_line(json.dumps(answer))
