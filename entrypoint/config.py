"""Settings: defaults < TOML file < SHARDBOOT_* < flags. Pure: the caller brings all four.

What there is to set stands in `surface.OPTIONS`.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from entrypoint import spelling
from entrypoint.errors import ConfigError
from entrypoint.spelling import Place
from entrypoint.surface import ENV_PREFIX, OPTIONS, Option

SWITCH = "SHARDBOOT"
"""`SHARDBOOT=off` becomes vLLM with the user's words untouched."""

OnMiss = Literal["save", "tee", "source", "refuse"]
OnFailure = Literal["serve-source", "refuse"]
Verify = Literal["size", "deep"]
Prove = Literal["auto", "always", "never"]


class Settings(NamedTuple):
    """Everything shardboot can be told, validated. Sizes in bytes, times in seconds."""

    vllm: str
    local_dir: Path
    state_dir: Path
    shared: str | None
    on_miss: OnMiss
    on_failure: OnFailure
    user: str | None
    dir_mode: int
    file_mode: int
    max_bytes: int | None
    reserve_bytes: int
    grace: float
    shared_grace: float
    size_per_file: int
    save_timeout: float
    quarantine_after: int
    prove: Prove
    publish: bool
    cache_bytes: int
    publish_caches: bool
    trust_caches: bool
    shared_readers: int
    verify: Verify
    prefetch: bool
    read_threads: int
    read_bytes: int
    checkpoint: str | None
    log_format: Literal["auto", "text", "json"]
    single_import: Literal["auto", "yes", "no"]
    standby: bool
    keep_warm: float
    max_restarts: int
    restart_delay: float
    hang_timeout: float
    stop_timeout: float
    listen: Place
    token_file: str | None
    watch_interval: float
    follow: bool
    prove_idle: Literal["auto", "yes", "no"]
    collect_interval: float
    scrub_interval: float
    scrub_rate: int


_BY_NAME = {option.name: option for option in OPTIONS}
_SERVICE_LINK = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What Kubernetes puts into every pod beside a Service that happens to be called shardboot."""

CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    *("HF_TOKEN", "VLLM_API_KEY"),
)
"""Secrets that vLLM and the clouds' clients read from the environment; no setting is one."""

CREDENTIAL_FILES = {f"{ENV_PREFIX}{name}_FILE": name for name in CREDENTIALS}
"""Variables that name a file with such a secret, and where it goes."""

_RESERVED = {ENV_PREFIX + "CONFIG_FILE", *CREDENTIAL_FILES}


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    document: Mapping[str, object] | None = None,
    *,
    document_name: str = "config file",
) -> Settings:
    """Merge all sources into one validated `Settings`.

    `flags` names all settings that the command takes, None where one was not given. What is for a
    sidecar alone, and wrong, costs no other command its start: that one has the default.
    Raises: ConfigError naming the flag, variable or key, with what was expected and found.
    """
    words: dict[str, tuple[str, str]] = {o.name: (o.default, "default") for o in OPTIONS}
    for key, value in (document or {}).items():
        name = key.replace("-", "_")
        if name not in _BY_NAME:
            _unknown(f"{document_name}: {key}", name, [o.name for o in OPTIONS])
        origin = f"{document_name}: {key}"
        words[name] = (_as_word(value, _BY_NAME[name], origin), origin)
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in _RESERVED:
            continue
        if _SERVICE_LINK.fullmatch(variable):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in _BY_NAME or _BY_NAME[name].variable != variable:
            _unknown(variable, variable, [*(o.variable for o in OPTIONS), *_RESERVED])
        words[name] = (value, variable)
    for name, flag in flags.items():
        if flag is not None:
            words[name] = (flag, _BY_NAME[name].flag)
    others = (option for option in OPTIONS if option.is_sidecars and option.name not in flags)
    words |= {o.name: (o.default, "default") for o in others if _is_wrong(o, words)}
    return _settings(words)


def _is_wrong(option: Option, words: Mapping[str, tuple[str, str]]) -> bool:
    try:
        option.parse(words[option.name][0])
    except ValueError:
        return True
    return False


def word_of(
    name: str,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    document: Mapping[str, object],
) -> str:
    """Return what one setting was given as, unchecked; its default where it is given nothing."""
    option = _BY_NAME[name]
    keys = (option.flag[2:], name)
    given = (flags.get(name), environ.get(option.variable), *map(document.get, keys))
    return next((str(word) for word in given if word is not None), "") or option.default


def _settings(words: Mapping[str, tuple[str, str]]) -> Settings:
    values: dict[str, object] = {}
    for name in Settings._fields:
        word, origin = words[name]
        try:
            values[name] = _BY_NAME[name].parse(word)
        except ValueError as error:
            msg = f"{origin}: {error}"
            raise ConfigError(msg) from None
    settings = Settings(**values)  # type: ignore[arg-type]
    _refuse_contradictions(settings)
    return settings


def _refuse_contradictions(settings: Settings) -> None:
    for name, path in (("local_dir", settings.local_dir), ("state_dir", settings.state_dir)):
        if not path.is_absolute():
            msg = f"{name}: expected an absolute path, found {str(path)!r}"
            raise ConfigError(msg)
    for name, mode in (("dir_mode", settings.dir_mode), ("file_mode", settings.file_mode)):
        if mode & 0o002:
            msg = f"{name}: {mode:04o} lets everybody write; checkpoints must not allow that"
            raise ConfigError(msg, hint="use 2750 and 0640, or 2755 and 0644 for all to read")
    if settings.publish and settings.shared is None:
        msg = "publish: there is no shared store to publish to"
        raise ConfigError(msg, hint="set --shared, or drop --publish")


def _as_word(value: object, option: Option, origin: str) -> str:
    if option.parse is spelling.mode and not isinstance(value, str):
        # TOML's 0o640 arrives as 416, and 640 as 640: nobody can tell which was meant.
        msg = f"{origin}: expected a mode as a text, found a number"
        raise ConfigError(msg, hint=f'write {option.name} = "{option.default}"')
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _unknown(what: str, name: str, known: list[str]) -> None:
    import difflib  # noqa: PLC0415 - a right setting needs no neighbours

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see `shardboot serve --help` for all settings"
    msg = f"{what}: unknown setting"
    raise ConfigError(msg, hint=hint)
