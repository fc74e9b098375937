from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.config import Settings, resolve
from entrypoint.errors import ConfigError, exit_code_of
from entrypoint.spelling import Place
from entrypoint.surface import OPTIONS, Option

SURFACE = {
    *("vllm", "local_dir", "state_dir", "shared", "on_miss", "on_failure", "user"),
    *("dir_mode", "file_mode", "max_bytes", "reserve_bytes", "size_per_file", "save_timeout"),
    *("grace", "shared_grace"),
    *("cache_bytes", "publish_caches", "trust_caches"),
    *("quarantine_after", "prove", "publish", "shared_readers", "verify", "checkpoint"),
    *("prefetch", "read_threads", "read_bytes", "single_import", "log_format"),
    *("standby", "keep_warm", "max_restarts", "restart_delay", "hang_timeout", "stop_timeout"),
    *("listen", "token_file", "watch_interval", "follow", "prove_idle"),
    *("collect_interval", "scrub_interval", "scrub_rate"),
}
"""Removing or renaming one of these breaks somebody's unit file."""

DEFAULTS: Mapping[str, object] = {
    "vllm": "vllm",
    "local_dir": Path("/var/lib/shardboot/checkpoints"),
    "state_dir": Path("/var/lib/shardboot/state"),
    "shared": None,
    "on_miss": "save",
    "on_failure": "serve-source",
    "user": None,
    "dir_mode": 0o2750,
    "file_mode": 0o640,
    "max_bytes": None,
    "reserve_bytes": 1024**3,
    "grace": 3600.0,
    "shared_grace": 7 * 86400.0,
    "size_per_file": 4 * 1024**3,
    "save_timeout": 3600.0,
    "quarantine_after": 3,
    "prove": "auto",
    "publish": False,
    "cache_bytes": 4 * 1024**3,
    "publish_caches": False,
    "trust_caches": False,
    "shared_readers": 0,
    "prefetch": True,
    "read_threads": 4,
    "read_bytes": 8 * 1024**2,
    "verify": "size",
    "checkpoint": None,
    "log_format": "auto",
    "single_import": "auto",
    "standby": False,
    "keep_warm": 0,
    "max_restarts": 10,
    "restart_delay": 60.0,
    "hang_timeout": math.inf,
    "stop_timeout": 30.0,
    "listen": Place("127.0.0.1", 8040),
    "token_file": None,
    "watch_interval": 60.0,
    "prove_idle": "auto",
    "follow": True,
    "collect_interval": 3600.0,
    "scrub_interval": 7 * 86400.0,
    "scrub_rate": 32 * 1024**2,
}

OTHER_WORDS: Mapping[str, tuple[str, object]] = {
    "vllm": ("/opt/vllm", "/opt/vllm"),
    "local_dir": ("/a", Path("/a")),
    "state_dir": ("/b", Path("/b")),
    "shared": ("/mnt/x", "/mnt/x"),
    "on_miss": ("refuse", "refuse"),
    "on_failure": ("refuse", "refuse"),
    "user": ("2000:2000", "2000:2000"),
    "dir_mode": ("0755", 0o755),
    "file_mode": ("644", 0o644),
    "max_bytes": ("2TB", 2 * 10**12),
    "reserve_bytes": ("0", 0),
    "grace": ("90min", 5400.0),
    "shared_grace": ("30d", 30 * 86400.0),
    "size_per_file": ("500MB", 500 * 10**6),
    "save_timeout": ("90s", 90.0),
    "quarantine_after": ("5", 5),
    "prove": ("always", "always"),
    "publish": ("yes", True),
    "cache_bytes": ("1GB", 10**9),
    "publish_caches": ("yes", True),
    "trust_caches": ("yes", True),
    "shared_readers": ("16", 16),
    "prefetch": ("no", False),
    "read_threads": ("16", 16),
    "read_bytes": ("1MiB", 1024**2),
    "verify": ("deep", "deep"),
    "checkpoint": ("name", "name"),
    "log_format": ("json", "json"),
    "single_import": ("no", "no"),
    "standby": ("yes", True),
    "keep_warm": ("auto", math.inf),
    "max_restarts": ("0", 0),
    "restart_delay": ("0", 0.0),
    "hang_timeout": ("2min", 120.0),
    "stop_timeout": ("5s", 5.0),
    "listen": ("[::1]:80", Place("::1", 80)),
    "token_file": ("/run/secrets/token", "/run/secrets/token"),
    "watch_interval": ("5s", 5.0),
    "prove_idle": ("yes", "yes"),
    "follow": ("no", False),
    "collect_interval": ("never", math.inf),
    "scrub_interval": ("30d", 30 * 86400.0),
    "scrub_rate": ("1MB", 1_000_000),
}

SHARED = {"SHARDBOOT_SHARED": "/mnt/shared"}


def value(settings: Settings, option: Option) -> object:
    return getattr(settings, option.name)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.is_sidecars and o.name != "follow"])
def test_what_a_sidecar_alone_is_told_stops_no_other_command(option: Option) -> None:
    wrong = {option.variable: "0"} if option.name != "token_file" else {}
    taken = dict.fromkeys(o.name for o in OPTIONS if not o.is_sidecars)
    for found in (resolve(taken, wrong), resolve(taken, {}, {option.name: "0"} if wrong else {})):
        assert getattr(found, option.name) == DEFAULTS[option.name]
    if wrong:
        with pytest.raises(ConfigError, match=option.variable):
            resolve(dict.fromkeys(o.name for o in OPTIONS), wrong)


def test_the_surface_is_the_one_that_was_promised() -> None:
    assert {option.name for option in OPTIONS} == SURFACE
    assert set(DEFAULTS) == SURFACE == set(OTHER_WORDS)


def test_defaults_are_the_documented_ones() -> None:
    settings = resolve({}, {})
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_taken_from_file_variable_and_flag_the_last_one_winning(
    option: Option,
) -> None:
    word, expected = OTHER_WORDS[option.name]
    # `publish` alone wants a shared store.
    beside = {} if option.name == "shared" else SHARED
    default = option.default
    assert value(resolve({}, beside, {option.name: word}), option) == expected
    assert value(resolve({}, beside, {option.name.replace("_", "-"): word}), option) == expected
    assert value(resolve({}, beside | {option.variable: word}), option) == expected
    assert value(resolve({option.name: word}, beside), option) == expected
    over_file = resolve({}, beside | {option.variable: word}, {option.name: default})
    assert value(over_file, option) == expected
    over_variable = resolve({option.name: word}, beside | {option.variable: default})
    assert value(over_variable, option) == expected
    not_given = resolve({option.name: None}, beside | {option.variable: word})
    assert value(not_given, option) == expected


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"SHARDBOOT_LOCAL_DIRR": "/x"}, "did you mean SHARDBOOT_LOCAL_DIR?"),
        ({"SHARDBOOT_ONMISS": "save"}, "did you mean SHARDBOOT_ON_MISS?"),
        ({"SHARDBOOT_local_dir": "/x"}, ""),
        ({"SHARDBOOT_": "x"}, ""),
        ({"SHARDBOOT_QQQQQQQQQQ": "x"}, "shardboot serve --help"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(
    environ: dict[str, str], hint: str
) -> None:
    with pytest.raises(ConfigError, match=next(iter(environ))) as caught:
        resolve({}, environ)
    assert hint in caught.value.hint
    assert exit_code_of(caught.value) == 10


def test_an_unknown_key_of_the_file_is_refused_by_file_and_name() -> None:
    with pytest.raises(ConfigError, match=r"x.toml: on_mis: unknown") as caught:
        resolve({}, {}, {"on_mis": "save"}, document_name="x.toml")
    assert caught.value.hint == "did you mean on_miss?"


def test_other_peoples_variables_are_nobodys_business() -> None:
    resolve({}, {"SHARDBOOTX": "1", "SHARDBOOT": "off", "SHARDBOOT_CONFIG_FILE": "/x", "A": ""})


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("reserve_bytes", "1", 1),
        ("reserve_bytes", "1k", 1000),
        ("reserve_bytes", "1KiB", 1024),
        ("reserve_bytes", "1.5GiB", 3 * 2**29),
        ("reserve_bytes", "500MB", 500_000_000),
        ("reserve_bytes", " 2 tib ", 2 * 2**40),
        ("max_bytes", "", None),
        ("save_timeout", "90", 90),
        ("save_timeout", "1.5h", 5400),
        ("save_timeout", "2min", 120),
        ("save_timeout", "2m", 120),
        ("save_timeout", "1d", 86400),
        ("dir_mode", "2750", 0o2750),
        ("dir_mode", "0o755", 0o755),
        ("file_mode", "0600", 0o600),
        ("shared", "", None),
        ("listen", "[::]:0", Place("::", 0)),
        ("listen", "localhost:08040", Place("localhost", 8040)),
        ("collect_interval", "1", 1.0),
        ("scrub_interval", "never", math.inf),
    ],
)
def test_sizes_times_and_modes_mean_what_they_say(name: str, word: str, expected: object) -> None:
    assert getattr(resolve({name: word}, {}), name) == expected


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        *((name, word, "a size such as") for name in ("reserve_bytes", "max_bytes")
          for word in ("x", "-1", "1xb", "1e3", "1,5G", "G", "inf")),
        ("size_per_file", "0", "at least one byte"),
        ("size_per_file", "0.5", "at least one byte"),
        *(("save_timeout", word, "a time such as") for word in ("x", "-1s", "1y", "1GiB", "")),
        *(("dir_mode", word, "an octal mode") for word in ("", "9", "0x755", "rwx", "75", "77777")),
        ("dir_mode", "2777", "lets everybody write"),
        ("file_mode", "0666", "lets everybody write"),
        ("file_mode", "0642", "lets everybody write"),
        ("local_dir", "relative", "absolute path"),
        ("state_dir", "", "found nothing"),
        ("vllm", "", "found nothing"),
        ("publish", "maybe", "yes or no"),
        ("publish", "yes", "no shared store"),
        ("on_miss", "never", "save, tee, source, refuse"),
        ("on_failure", "SERVE-SOURCE", "serve-source"),
        ("verify", "", "size, deep"),
        ("quarantine_after", "0", "from 1"),
        ("quarantine_after", "-1", "from 1"),
        ("quarantine_after", "1.0", "from 1"),
        ("shared_readers", "-1", "0 for no limit"),
        ("shared_readers", "none", "0 for no limit"),
        *(("read_threads", word, "1 to 256") for word in ("257", "1000000000")),
        ("read_threads", "0", "from 1"),
        *(("read_bytes", word, "64KiB to 1GiB") for word in ("0", "65535", "2GiB")),
        ("log_format", "yaml", "auto, text, json"),
        *(("listen", word, "HOST:PORT") for word in
          ("", "8040", ":8040", "host", "host:", "host:65536", "host:x", "::1:80", "[x]:1")),
        ("collect_interval", "always", "or never"),
        ("scrub_interval", "", "or never"),
        *((name, word, "expected 1 s or more, found") for word in ("0", "0.999s")
          for name in ("watch_interval", "collect_interval", "scrub_interval")),
        ("watch_interval", "never", "a time such as"),
        ("scrub_rate", "0", "at least one byte"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(name: str, word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        resolve({name: word}, {})
    assert name in str(caught.value).replace("-", "_")


@pytest.mark.parametrize("word", ["90b", "1hb"])
def test_a_time_in_bytes_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        resolve({"save_timeout": word}, {})


def test_a_size_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ConfigError):
        resolve({"reserve_bytes": "9" * 400}, {})


def test_an_octal_number_of_toml_is_that_mode_or_refused() -> None:
    with contextlib.suppress(ConfigError):
        assert resolve({}, {}, {"file_mode": 0o644}).file_mode == 0o644


@pytest.mark.parametrize(
    ("document", "name", "expected"),
    [
        ({"publish": True, "shared": "/x"}, "publish", True),
        ({"save_timeout": 90}, "save_timeout", 90.0),
        ({"user": 2000}, "user", "2000"),
        ({"reserve_bytes": 10}, "reserve_bytes", 10),
    ],
)
def test_toml_types_are_taken_as_their_words(
    document: dict[str, object], name: str, expected: object
) -> None:
    assert getattr(resolve({}, {}, document), name) == expected


@given(st.sampled_from(OPTIONS), st.text(max_size=20))
def test_any_word_gives_settings_or_an_error_of_ours(option: Option, word: str) -> None:
    with contextlib.suppress(ConfigError):
        resolve({option.name: word}, SHARED)
