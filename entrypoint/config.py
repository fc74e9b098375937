"""Settings: defaults < TOML file < SHARDBOOT_* < flags. Pure: the caller brings all four.

One table, `OPTIONS`, is the whole surface; flags, variables, TOML keys and docs follow from it.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from entrypoint import spelling
from entrypoint.errors import ConfigError
from entrypoint.spelling import Place

ENV_PREFIX = "SHARDBOOT_"
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
    checkpoint: str | None
    log_format: Literal["auto", "text", "json"]
    single_import: Literal["auto", "yes", "no"]
    standby: bool
    max_restarts: int
    restart_delay: float
    hang_timeout: float
    stop_timeout: float
    listen: Place
    watch_interval: float
    follow: bool
    collect_interval: float
    scrub_interval: float
    scrub_rate: int


class Option(NamedTuple):
    """One setting: its name (`local_dir`), its default as a user would write it, its meaning.

    One that `is_sidecars` is a flag of no other command.
    """

    name: str
    default: str
    parse: Callable[[str], object]
    help: str
    metavar: str = "VALUE"
    is_sidecars: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling, `--local-dir`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment twin, `SHARDBOOT_LOCAL_DIR`."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag comes as a pair, `--publish/--no-publish`."""
        return self.parse is spelling.switch


OPTIONS: tuple[Option, ...] = (
    Option("vllm", "vllm", spelling.text, "the vllm executable to become", "PATH"),
    Option(
        "local_dir",
        "/var/lib/shardboot/checkpoints",
        spelling.path,
        "the local store: checkpoints on this node's own disk",
        "DIR",
    ),
    Option(
        "state_dir",
        "/var/lib/shardboot/state",
        spelling.path,
        "what outlives the process: ledger, remembered answers, status",
        "DIR",
    ),
    Option(
        "shared",
        "",
        spelling.optional,
        "the shared store: a path, or a file, s3, gs or az URL",
        "URL",
    ),
    Option(
        "on_miss",
        "save",
        spelling.one_of("save", "tee", "source", "refuse"),
        "no checkpoint fits: save one before serving, or while serving the source, or do not",
        "save|tee|source|refuse",
    ),
    Option(
        "on_failure",
        "serve-source",
        spelling.one_of("serve-source", "refuse"),
        "shardboot itself fails: serve the source as if it were not there, or refuse",
        "serve-source|refuse",
    ),
    Option(
        "user",
        "",
        spelling.optional,
        "as root: the service user that owns the stores and runs vLLM",
        "UID[:GID]|NAME[:GROUP]",
    ),
    Option("dir_mode", "2750", spelling.mode, "mode of a checkpoint's directories", "OCTAL"),
    Option("file_mode", "0640", spelling.mode, "mode of a checkpoint's files", "OCTAL"),
    Option("max_bytes", "", spelling.optional_bytes, "most bytes the local store may hold", "SIZE"),
    Option(
        "reserve_bytes",
        "1GiB",
        spelling.byte_count,
        "free space that must stay on its disk",
        "SIZE",
    ),
    Option("grace", "1h", spelling.seconds, "what is younger is never collected", "TIME"),
    Option("shared_grace", "7d", spelling.seconds, "the same in the shared store", "TIME"),
    Option(
        "size_per_file", "4GiB", spelling.file_bytes, "largest shard file a save writes", "SIZE"
    ),
    Option("save_timeout", "1h", spelling.seconds, "longest a save may take", "TIME"),
    Option(
        "quarantine_after",
        "3",
        spelling.count,
        "boots in a row that died while loading a checkpoint before it is given up",
        "COUNT",
    ),
    Option(
        "prove",
        "auto",
        spelling.one_of("auto", "always", "never"),
        "prove a save against the source before serving it: all but plain dense ones, all, none",
        "auto|always|never",
    ),
    Option(
        "publish", "no", spelling.switch, "push a fresh save to the shared store before serving"
    ),
    Option(
        "cache_bytes",
        "4GiB",
        spelling.byte_count,
        "most bytes that what vLLM compiled for all checkpoints may hold",
        "SIZE",
    ),
    Option("publish_caches", "no", spelling.switch, "push what vLLM compiled with a checkpoint"),
    Option("trust_caches", "no", spelling.switch, "copy what vLLM compiled, too: it is code"),
    Option(
        "shared_readers",
        "0",
        spelling.limit,
        "most nodes that copy from the shared store, a directory, at once; 0 is no limit",
        "COUNT",
    ),
    Option(
        "verify",
        "size",
        spelling.one_of("size", "deep"),
        "check of a local checkpoint before serving: sizes and headers, or every byte",
        "size|deep",
    ),
    Option(
        "prefetch",
        "yes",
        spelling.switch,
        "read a checkpoint into the page cache while vLLM starts",
    ),
    Option("checkpoint", "", spelling.optional, "the one checkpoint to consider, by name", "NAME"),
    Option(
        "log_format",
        "auto",
        spelling.one_of("auto", "text", "json"),
        "lines for people, with bars on a terminal (auto), never with bars (text), or JSON lines",
        "auto|text|json",
    ),
    Option(
        "single_import",
        "auto",
        spelling.one_of("auto", "yes", "no"),
        "vLLM imports once on a hit, and forks its engine and workers: on a CPU, always, never",
        "auto|yes|no",
    ),
    Option(
        "standby",
        "no",
        spelling.switch,
        "stay, with vLLM imported, and start the next server within seconds of a crash",
    ),
    Option(
        "max_restarts",
        "10",
        spelling.limit,
        "with a standby: restarts in a row before it is given up; 0 is no limit",
        "COUNT",
    ),
    Option(
        "restart_delay",
        "1min",
        spelling.seconds,
        "with a standby: longest delay before a restart; the first is at once",
        "TIME",
    ),
    Option(
        "hang_timeout",
        "never",
        spelling.interval,
        "with a standby: replace a server that has not answered /health for so long, or never",
        "TIME",
    ),
    Option(
        "stop_timeout",
        "30s",
        spelling.seconds,
        "with a standby: how long vLLM may take to stop before it is killed",
        "TIME",
    ),
    *(
        option._replace(is_sidecars=True)
        for option in (
            Option(
                "listen", "127.0.0.1:8040", spelling.place, "where it answers HTTP", "HOST:PORT"
            ),
            Option(
                "watch_interval",
                "1min",
                spelling.period,
                "how often boots and stores are looked at",
                "TIME",
            ),
            Option(
                "follow",
                "yes",
                spelling.switch,
                "copy newer checkpoints of what this node serves",
            ),
            Option(
                "collect_interval",
                "1h",
                spelling.interval,
                "how often to collect, or never",
                "TIME",
            ),
            Option(
                "scrub_interval",
                "7d",
                spelling.interval,
                "how often every byte of each local checkpoint is read, or never",
                "TIME",
            ),
            Option(
                "scrub_rate",
                "32MiB",
                spelling.file_bytes,
                "most bytes to read for that, a second",
                "SIZE",
            ),
        )
    ),
)
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
    return _settings(words)


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
