"""The token without which nothing is changed over HTTP. It lies in a file, and is never shown."""

from __future__ import annotations

import hmac
from typing import Final

from entrypoint.errors import ConfigError
from entrypoint.start import read_secret

SHORTEST: Final = 16
"""Characters: what somebody could guess by asking is no token."""

_SCHEME: Final = "bearer "


class Token:
    """What a request has to bring along."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode(errors="surrogateescape")

    def is_in(self, authorization: str) -> bool:
        """Tell whether the header `Authorization` brings it, in a time that tells nothing of it."""
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        # Headers come as Latin-1 (http.client), where bytes of a token may look like blanks.
        given = authorization[len(_SCHEME) :].strip(" \t") if is_bearer else ""
        return hmac.compare_digest(given.encode("latin-1", "replace"), self._secret)


def token_in(path: str | None) -> Token | None:
    """Return the token in a file, None for no file. Raises: ConfigError, without it."""
    if path is None:
        return None
    secret = read_secret("token_file", path)
    if len(secret) < SHORTEST:
        msg = f"token_file: {path}: expected a token of {SHORTEST} characters or more"
        raise ConfigError(msg, hint="`openssl rand -hex 32` makes one")
    return Token(secret)
