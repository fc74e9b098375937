"""What a boot is at, for whoever asks meanwhile: one small file a boot, always whole.

    STATE-DIR/status/BOOT.json

A file a boot, since several servers may share one state directory. exec keeps the pid, so that the
file stays true of vLLM; what vLLM comes to afterwards stands in the ledger.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.state import process
from entrypoint.state.files import write_json
from entrypoint.state.places import below

MAX_FILES: Final = 32
KEPT_FILES: Final = 16
"""What stays when there are more than that many, so that not every boot has to tidy up."""

MAX_STATUS_BYTES: Final = 64 * 1024
LIMITS: Final = {int: 1 << 60, float: 1e11, bool: 1}
"""The most bytes, and seconds since 1970, that a file is believed."""

PUBLIC: Final = 0o644
"""No secret, and an operator who is root marks what the service user must read."""

Life = Literal["here", "elsewhere", "gone"]

T = TypeVar("T", bound=tuple[Any, ...])


class Address(NamedTuple):
    """Where vLLM answers HTTP: on a Unix socket, else on a host ("" for every interface) and port.

    `certfile` or `keyfile` mean TLS, `mutual` that clients need a certificate as well. `headless`
    speaks no HTTP at all. `assumed`: vLLM was not asked, so what no word says is its default.
    """

    host: str = ""
    port: int = 8000
    uds: str = ""
    certfile: str = ""
    keyfile: str = ""
    mutual: bool = False
    headless: bool = False
    assumed: bool = False

    def __str__(self) -> str:
        scheme = "https" if self.is_tls else "http"
        if self.uds:
            return f"{scheme}+unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host or "*"
        return f"{scheme}://{host}:{self.port}"

    @property
    def is_tls(self) -> bool:
        """Whether uvicorn serves TLS: one of the two is enough for it."""
        return bool(self.certfile or self.keyfile)


class Server(NamedTuple):
    """A process of a boot: the one that boots and then is vLLM, or its supervisor.

    A pid alone is reused, and means another elsewhere.

    `start` in clock ticks since the host's boot `host_boot`; `namespace` is the one of its pid.
    """

    pid: int = 0
    start: int = 0
    namespace: str = ""
    host_boot: str = ""

    @classmethod
    def this(cls) -> "Server":
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Server":
        """Return a process of this container."""
        return cls(pid, process.started(pid) or 0, process.namespace(), process.host_boot())

    @property
    def life(self) -> Life:
        """Whether it still runs; `elsewhere` where its pid is another container's."""
        if self.host_boot != process.host_boot():
            return "gone"
        if self.namespace != process.namespace():
            return "elsewhere"
        return "here" if process.is_alive(self.pid, self.start) else "gone"


class Status(NamedTuple):
    """One boot, as far as it knows itself. Times are seconds since 1970, `eta` seconds, 0 unknown.

    `phase`: deciding, waiting, copying, verifying, saving, proving, publishing, starting (vLLM),
    failed. `since` is its beginning. `tier` is where the weights come from: local, shared, saved,
    source. `ranks` are those of the checkpoint that are here, where not all are. `healthy` is when
    vLLM first answered, 0 before. `supervisor` is the process that starts the next server when
    this one is gone; none where vLLM was exec'd.
    """

    boot: str = ""
    phase: str = ""
    text: str = ""
    action: str = ""
    tier: str = ""
    reason: str = ""
    checkpoint: str = ""
    ranks: str = ""
    done: int = 0
    total: int = 0
    eta: float = 0.0
    started: float = 0.0
    since: float = 0.0
    updated: float = 0.0
    healthy: float = 0.0
    server: Server = Server()
    supervisor: Server = Server()
    address: Address = Address()

    def to_json(self) -> dict[str, Json]:
        """Return it as it lies on disk."""
        parts = ("server", "supervisor", "address")
        return self._asdict() | {name: getattr(self, name)._asdict() for name in parts}

    @classmethod
    def from_json(cls, value: Json) -> "Status | None":
        """Return what a file says, its odd fields at their defaults; None when it names no boot."""
        found = _filled(cls(), value)
        if not found.boot or not isinstance(value, dict):
            return None
        return found._replace(
            server=_filled(Server(), value.get("server")),
            supervisor=_filled(Server(), value.get("supervisor")),
            address=_filled(Address(), value.get("address")),
        )


def _filled(base: T, value: Json) -> T:
    """Return `base` with the fields of `value` that are what they ought to be."""
    named = cast("Any", base)
    if not isinstance(value, dict):
        return base
    found = {}
    for name, default in named._asdict().items():
        given = value.get(name)
        if type(given) is not type(default):
            continue
        if isinstance(given, (int, float)) and not 0 <= given <= LIMITS[type(given)]:
            continue
        if isinstance(given, str) and "\0" in given:
            # No name of a host or a file, and C says so in its own ways.
            continue
        found[name] = given
    return cast("T", named._replace(**found))


def write(root: Path, status: Status) -> None:
    """Replace the file of a boot: whole after a crash, but not kept through a power loss.

    A hit must not wait for the disk, and after a power loss the boot is over. Raises: OSError.
    """
    path = _path(root, status.boot)
    try:
        write_json(path, status.to_json(), PUBLIC, durable=False)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, status.to_json(), PUBLIC, durable=False)


def read_all(root: Path) -> list[Status]:
    """Return all boots that left a status, newest first; what cannot be read is passed over."""
    try:
        names = [name for name in os.listdir(below(root, "status")) if name.endswith(".json")]
    except OSError:
        return []
    found = (_read(below(root, "status") / name) for name in names if name[0] != ".")
    return sorted((s for s in found if s is not None), key=lambda s: s.started, reverse=True)


def read(root: Path, boot: str) -> Status | None:
    """Return the status of a boot; None where it left none that can be read."""
    return _read(_path(root, boot))


def _read(path: Path) -> Status | None:
    try:
        found = Status.from_json(json.loads(read_bounded(path, MAX_STATUS_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    return found if found is not None and found.boot == path.stem else None


def meant(boots: Iterable[Status]) -> Status | None:
    """Return the boot that is meant where several left a status: the newest that runs here.

    Else the newest whose process cannot be seen from here, else the newest. `boots`: newest first.
    """
    others: dict[Life, Status] = {}
    for status in boots:
        life = status.server.life
        if life == "here":
            return status
        others.setdefault(life, status)
    return others.get("elsewhere") or others.get("gone")


def touch(root: Path, boot: str) -> None:
    """Note that somebody asks about this boot, so that its file is the last one to be forgotten."""
    with contextlib.suppress(OSError):
        os.utime(_path(root, boot), follow_symlinks=False)


def forget_oldest(root: Path) -> None:
    """Keep the files that were written or asked about last.

    By use and not by life: the pid of another container's server says nothing here.
    """
    directory = below(root, "status")
    with contextlib.suppress(OSError):
        if len(os.listdir(directory)) <= MAX_FILES:
            return
        entries = sorted(os.scandir(directory), key=lambda e: e.stat().st_mtime, reverse=True)
        for entry in entries[KEPT_FILES:]:
            os.unlink(entry.path)


def _path(root: Path, boot: str) -> Path:
    return below(root, "status") / f"{boot}.json"
