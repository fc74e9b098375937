"""A bucket: what its URL may say, the one client that reaches it, and what its errors mean.

Credentials are the environment's, in the names that the clouds' own tools read, or what the
machine's metadata service hands out. The client takes them from there; shardboot neither holds
nor prints them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from entrypoint import __version__
from entrypoint.checkpoint.entry import check_path
from entrypoint.errors import ConfigError, ManifestError, NotFoundError, StoreError

if TYPE_CHECKING:
    from typing import TypeAlias

    from obstore.store import AzureStore, ClientConfig, GCSStore, MemoryStore, RetryConfig, S3Store

    Client: TypeAlias = AzureStore | GCSStore | MemoryStore | S3Store

VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


class Bucket(NamedTuple):
    """A bucket, in Azure's words a container, and the prefix below which a store lies."""

    scheme: str
    name: str
    prefix: str

    @property
    def where(self) -> str:
        """The URL without anything that it need not say."""
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


class Patience(NamedTuple):
    """How long to wait for an answer, in seconds, and how often and how long to try again."""

    connecting: float
    silence: float
    request: float
    tries: int
    trying: float


ASKING: Final = Patience(connecting=3, silence=5, request=10, tries=4, trying=5)
"""For small questions, which a boot waits for."""

WRITING: Final = Patience(connecting=5, silence=20, request=120, tries=10, trying=60)
"""For the bytes of checkpoints; 503 and "slow down" are waited out."""

READING: Final = WRITING._replace(request=600)
"""The same; an answer that comes slowly, as over a line that many share, is no failure."""


def parse(scheme: str, rest: str) -> Bucket:
    """Read what follows `scheme://` in a URL. Raises: ConfigError, which repeats no secret."""
    plain = re.split("[?#]", rest, maxsplit=1)[0]
    name, _, path = plain.partition("/")
    prefix = path.strip("/")
    if plain != rest:
        msg = f"{scheme}://{name}: expected a bucket and a prefix, found a query or a fragment"
        raise ConfigError(msg, hint=f"credentials come from the environment: {VARIABLES[scheme]}")
    if not _BUCKET.fullmatch(name):
        msg = f"{scheme}://{name}: expected {scheme}://BUCKET/PREFIX"
        raise ConfigError(msg, hint="an endpoint of your own goes into AWS_ENDPOINT_URL")
    if prefix:
        try:
            check_path(prefix, "prefix")
        except ManifestError as error:
            raise ConfigError(f"{scheme}://{name}: {error}") from None
    return Bucket(scheme, name, prefix)


def connect(bucket: Bucket, patience: Patience) -> Client:
    """Return a client; no request is made yet. Raises: StoreError.

    Requests are tried again in this client and nowhere else: 5xx, "slow down", connections that
    break, answers that end early or do not come.
    """
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra; a hit does without
    from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415

    options: ClientConfig = {
        # An endpoint is https unless its URL, which is the user's own, says http.
        "allow_http": True,
        "connect_timeout": timedelta(seconds=patience.connecting),
        "read_timeout": timedelta(seconds=patience.silence),
        "timeout": timedelta(seconds=patience.request),
        "user_agent": f"shardboot/{__version__}",
    }
    again: RetryConfig = {
        "max_retries": patience.tries,
        "retry_timeout": timedelta(seconds=patience.trying),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }
    kinds: dict[str, Callable[..., Client]] = {
        # What bulk deletes answer is not the same everywhere.
        "s3": partial(S3Store, disable_bulk_delete=True),
        "gs": GCSStore,
        "az": AzureStore,
    }
    try:
        return kinds[bucket.scheme](
            bucket.name, prefix=bucket.prefix or None, client_options=options, retry_config=again
        )
    except (BaseError, OSError, ValueError) as error:
        hint = f"see the environment: {VARIABLES[bucket.scheme]}"
        raise StoreError(f"{bucket.where}: {reason_of(str(error))}", hint=hint) from None


@contextlib.contextmanager
def asking(where: str) -> Iterator[None]:
    """Turn the client's errors into ours, which name `where` and hold no secret.

    Raises: NotFoundError; StoreError.
    """
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra; a hit does without

    try:
        yield
    except (BaseError, OSError) as error:
        text = str(error)
        reason = reason_of(text)
        if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(text):
            raise NotFoundError(f"{where}: not there: {reason}") from None
        raise StoreError(f"{where}: {reason}", hint=_hint(text)) from None


_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_TRIES = re.compile(r"after (\d+) retries")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")
_SYMPTOMS: Final = (
    (re.compile(r"TimedOut|timed out|Timeout"), "no answer in time"),
    (re.compile(r"dns error|failed to lookup"), "the name of its host cannot be resolved"),
    (re.compile(r"[Cc]ertificate|UnknownIssuer"), "its certificate is not trusted"),
    (re.compile(r"ConnectionRefused|tcp connect error|NotConnected"), "no connection"),
    (
        re.compile(r"IncompleteMessage|UnexpectedEof|ConnectionReset|end of file before"),
        "the connection broke before the answer ended",
    ),
)
_HINTS: Final = (
    (re.compile(r"Expired|InvalidToken|TokenRefreshRequired"), "renew the credentials"),
    (_NO_BUCKET, "make the bucket, or mend its name, its region or the endpoint"),
    (re.compile(r"code: 40[13]"), "see what the environment's credentials may do there"),
    (re.compile(r"code: (503|429)|SlowDown"), "it asks for fewer requests: try again later"),
    (re.compile(r"BareRedirect|without LOCATION"), "set AWS_REGION to the bucket's region"),
)


def reason_of(text: str) -> str:
    """Say in few words what an error of the client means.

    Its own text is not for logs: a server's answer may repeat tokens, and a URL may be signed.
    """
    said = _STATUS.search(text)
    tries = _TRIES.search(text)
    if _METADATA.search(text):
        reason = "no credentials in the environment, and none from a metadata service"
    elif said is not None:
        parts = [match[1] for match in (_CODE.search(text), _MESSAGE.search(text)) if match]
        reason = ": ".join([said[1].strip(), *parts])
    else:
        symptoms = (words for pattern, words in _SYMPTOMS if pattern.search(text))
        reason = next(symptoms, "") or _first_line(text)
    return f"{reason} (tried {int(tries[1]) + 1} times)" if tries else reason


def _first_line(text: str) -> str:
    line = text.partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"\w+://\S+", "…", line)[:200]


def _hint(text: str) -> str:
    return next((hint for pattern, hint in _HINTS if pattern.search(text)), "")
