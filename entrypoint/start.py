"""How a command starts: files read, settings merged, the umask tightened, root dropped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from entrypoint import config
from entrypoint.config import SWITCH, Settings
from entrypoint.errors import ConfigError
from entrypoint.log import Log, stderr_log
from entrypoint.privilege.stepping_down import become_reader, look_after, step_down

if TYPE_CHECKING:
    from entrypoint.assess import Boot

OFF: Final = ("off", "0", "no", "false")
CONFIG_FILE: Final = "SHARDBOOT_CONFIG_FILE"
DEFAULT_CONFIG_FILE: Final = Path("/etc/shardboot/shardboot.toml")
MAX_CREDENTIAL_BYTES: Final = 16 * 1024


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Merge defaults, TOML file, environment and flags. Raises: ConfigError."""
    words = {n: ("yes" if v else "no") if isinstance(v, bool) else v for n, v in flags.items()}
    document = _read_document(environ)
    return config.resolve(words, environ, document, document_name=str(_document_path(environ)))


def _document_path(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(CONFIG_FILE) or DEFAULT_CONFIG_FILE)


def _read_document(environ: Mapping[str, str]) -> dict[str, object]:
    path = _document_path(environ)
    try:
        with path.open("rb") as file:
            import tomllib  # noqa: PLC0415 - most boots have no such file

            return tomllib.load(file)
    except OSError as error:
        is_there = not isinstance(error, (FileNotFoundError, NotADirectoryError))
        if not is_there and not environ.get(CONFIG_FILE):
            return {}
        msg = f"{path}: {error.strerror}"
        raise ConfigError(msg, hint=f"it is named by {CONFIG_FILE}, or lies there") from None
    except (ValueError, RecursionError) as error:
        msg = f"{path}: {error}"
        raise ConfigError(msg, hint="see the README's table of settings") from None


def take_credentials(environ: MutableMapping[str, str]) -> None:
    """Put the secret in the file that `SHARDBOOT_X_FILE` names into X, where others look for it.

    To be called before root is dropped: perhaps root alone may read it. An empty variable is as
    good as none. Raises: ConfigError, which repeats no secret.
    """
    for variable, name in config.CREDENTIAL_FILES.items():
        path = environ.pop(variable, "")
        if path and environ.get(name):
            msg = f"{variable}: {name} is set as well"
            raise ConfigError(msg, hint="expected one of the two")
        if path:
            environ[name] = read_secret(variable, path)


def read_secret(variable: str, path: str) -> str:
    """Return the secret in a file that `variable` names. Raises: ConfigError, without it."""
    if not path.startswith("/"):
        # It is not repeated: perhaps it is the secret itself.
        raise ConfigError(f"{variable}: expected the absolute path of a file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CREDENTIAL_BYTES + 1)
    except OSError as error:
        msg = f"{variable}: {path}: {error.strerror}"
        raise ConfigError(msg, hint="expected a file that holds a secret in one line") from None
    word = os.fsdecode(data.rstrip(b"\r\n"))
    if not word or not word.isprintable() or len(data) > MAX_CREDENTIAL_BYTES:
        found = "something else" if word else "nothing"
        msg = f"{variable}: {path}: expected a secret in one line, found {found}"
        raise ConfigError(msg)
    return word


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether shardboot is told to keep out of the way."""
    return environ.get(SWITCH, "").lower() in OFF


def read_when_off(
    flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[str, str | None, Path]:
    """Return what counts when switched off, whatever is wrong with all else.

    These are the program, the user, and the state directory, where that user's caches are kept.

    A config file that cannot be read is said in one line, and does not count.
    """
    document: Mapping[str, object] = {}
    try:
        document = _read_document(environ)
    except ConfigError as error:
        text = f"{error}; switched off, so only flags and variables count"
        unchecked_log(flags, environ, is_daemon=True).line(error.reason, text)
    names = ("vllm", "user", "state_dir")
    vllm, user, state_dir = (config.word_of(n, flags, environ, document) for n in names)
    return vllm, user or None, Path(state_dir)


def unchecked_log(flags: Mapping[str, Any], environ: Mapping[str, str], *, is_daemon: bool) -> Log:
    """Return a log in the format that was asked for, whatever is wrong with all settings."""
    document: Mapping[str, object] = {}
    with contextlib.suppress(ConfigError):
        document = _read_document(environ)
    setting = config.word_of("log_format", flags, environ, document)
    return stderr_log("", setting, is_daemon=is_daemon)


def tighten_umask() -> int:
    """Let nothing that is made from now on be writable by everybody; return the umask before."""
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    return umask


def settings_as_user(
    flags: Mapping[str, Any],
    environ: MutableMapping[str, str],
    *,
    opens_stores: bool = True,
    is_daemon: bool = False,
) -> Settings:
    """Return the settings, as the service user: what root wrote, a server could not read.

    Who `opens_stores` has the credentials for them. Raises as `new_boot`.
    """
    if opens_stores:
        take_credentials(environ)
    settings = read_settings(flags, environ)
    log = stderr_log("", settings.log_format, is_daemon=is_daemon)
    tighten_umask()
    if not opens_stores:
        become_reader(settings, environ)
    if settings.user is None:
        look_after(settings)
    elif opens_stores:
        step_down(settings, environ, log, touches_store=False)
    return settings


def new_boot(
    flags: Mapping[str, Any],
    words: tuple[str, ...],
    environ: MutableMapping[str, str],
    *,
    touches_store: bool = True,
    serves: bool = False,
) -> Boot:
    """Return the boot that flags and words ask for, root dropped and its environment made ready.

    One that `serves` keeps a status, and has a daemon's log.
    Raises: ConfigError, PrivilegeError, OwnershipError.
    """
    from entrypoint import boot  # noqa: PLC0415 - what only looks at boots needs none of these
    from entrypoint.assess import Boot  # noqa: PLC0415
    from entrypoint.engine.address import address  # noqa: PLC0415
    from entrypoint.state.reporter import Reporter  # noqa: PLC0415

    take_credentials(environ)
    settings = read_settings(flags, environ)
    log = stderr_log(boot.new_boot_id(), settings.log_format, is_daemon=serves)
    umask = tighten_umask()
    step_down(settings, environ, log, touches_store=touches_store)
    status = Reporter(settings.state_dir if serves else None, log.boot, address(words, None))
    return Boot(settings, words, dict(environ), log, status, umask)


def another(boot: Boot) -> Boot:
    """Return a boot that serves as this one, with an id, a log and a status of its own."""
    from entrypoint.boot import new_boot_id  # noqa: PLC0415 - it is there by now
    from entrypoint.engine.address import address  # noqa: PLC0415
    from entrypoint.state.reporter import Reporter  # noqa: PLC0415

    log = stderr_log(new_boot_id(), boot.settings.log_format, is_daemon=True)
    status = Reporter(boot.settings.state_dir, log.boot, address(boot.words, None))
    return boot._replace(log=log, status=status)
