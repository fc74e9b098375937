"""The whole surface, in one table: flags, variables, TOML keys and docs follow from it. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Callable
from typing import NamedTuple

from entrypoint import spelling

ENV_PREFIX = "SHARDBOOT_"


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
        "what outlives the process: ledger, answers, logs, and what vLLM compiled",
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
        "no checkpoint fits: save one first, save one while the source is served, only serve the "
        "source, or refuse",
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
    Option(
        "save_timeout", "1h", spelling.seconds, "longest a save may take, with its proof", "TIME"
    ),
    Option(
        "quarantine_after",
        "3",
        spelling.count,
        "boots in a row that died on a checkpoint, or saves that failed, before it is given up",
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
        "publish",
        "no",
        spelling.switch,
        "push fresh saves to the shared store: a boot before it serves, a sidecar afterwards",
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
    Option(
        "read_threads",
        "4",
        spelling.threads,
        "threads with which each rank of vLLM reads its checkpoint",
        "COUNT",
    ),
    Option("read_bytes", "8MiB", spelling.read_bytes, "most bytes of one such read", "SIZE"),
    Option("checkpoint", "", spelling.optional, "the one checkpoint to consider, by name", "NAME"),
    Option(
        "log_format",
        "auto",
        spelling.one_of("auto", "text", "json"),
        "lines for people on a terminal, with bars; elsewhere JSON from serve and sidecar (auto); "
        "or always lines for people (text), or JSON (json)",
        "auto|text|json",
    ),
    Option(
        "single_import",
        "auto",
        spelling.one_of("auto", "yes", "no"),
        "vLLM imports once on a hit or tee, and forks its other processes: on a CPU (auto), "
        "wherever nothing stands against it (yes), never (no)",
        "auto|yes|no",
    ),
    Option(
        "standby",
        "no",
        spelling.switch,
        "stay, with vLLM imported, and start the next server within seconds of a crash",
    ),
    Option(
        "keep_warm",
        "off",
        spelling.kept_bytes,
        "with a standby: keep so much of the checkpoint in the page cache while a server runs, as "
        "memory allows; auto is all of it",
        "SIZE|auto|off",
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
                "token_file",
                "",
                spelling.optional,
                "file with the token that whoever asks for a job over HTTP must bring",
                "FILE",
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
                "prove_idle",
                "auto",
                spelling.one_of("auto", "yes", "no"),
                "prove what nobody proved while memory is free: on a CPU, anywhere, or not at all",
                "auto|yes|no",
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
