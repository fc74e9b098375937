"""What a command starts with: the file that is there, and what counts when switched off."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint import start
from entrypoint.config import CREDENTIALS
from entrypoint.errors import ConfigError, PrivilegeError, exit_code_of
from entrypoint.start import (
    new_boot,
    read_settings,
    read_when_off,
    settings_as_user,
    take_credentials,
)
from entrypoint.surface import OPTIONS

FILE = 'vllm = "/opt/file"\nuser = 2000\n'
STATE = "/var/lib/shardboot/state"


@pytest.mark.parametrize(
    ("text", "environ", "flags", "found"),
    [
        ("", {}, {}, ("vllm", None, STATE)),
        (FILE, {}, {}, ("/opt/file", "2000", STATE)),
        (FILE, {"SHARDBOOT_VLLM": "/opt/variable"}, {}, ("/opt/variable", "2000", STATE)),
        (FILE, {"SHARDBOOT_USER": "3000"}, {"vllm": "/opt/flag"}, ("/opt/flag", "3000", STATE)),
        (FILE, {"SHARDBOOT_USER": "3000"}, {"user": "4000"}, ("/opt/file", "4000", STATE)),
        (FILE, {"SHARDBOOT_USER": ""}, {"user": None}, ("/opt/file", None, STATE)),
        (f"{FILE}state-dir = '/s'", {}, {}, ("/opt/file", "2000", "/s")),
        (f"{FILE}state_dir = '/s'", {}, {}, ("/opt/file", "2000", "/s")),
        (
            f'on_mis = 1\n{FILE}file_mode = "0666"',
            {"SHARDBOOT_X": "x"},
            {},
            ("/opt/file", "2000", STATE),
        ),
    ],
)
def test_switched_off_the_settings_that_count_are_read_as_ever_and_no_other(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    environ: dict[str, str],
    flags: Mapping[str, str | None],
    found: tuple[str, str | None, str],
) -> None:
    path = tmp_path / "shardboot.toml"
    path.write_text(text)
    vllm, user, state_dir = read_when_off(flags, environ | {"SHARDBOOT_CONFIG_FILE": str(path)})
    assert (vllm, user, str(state_dir)) == found
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("data", [b"vllm = ", b"\xff\xfe", b"a = " + b"[" * 10_000, None])
def test_switched_off_a_file_that_is_broken_is_said_and_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], data: bytes | None
) -> None:
    path = tmp_path / "shardboot.toml"
    if data is not None:
        path.write_bytes(data)
    environ = {"SHARDBOOT_CONFIG_FILE": str(path), "SHARDBOOT_USER": "2000"}
    environ["SHARDBOOT_LOG_FORMAT"] = "text"
    assert read_when_off({"vllm": "/opt/flag"}, environ)[:2] == ("/opt/flag", "2000")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"shardboot: config.invalid: {path}: ")
    assert line.endswith("only flags and variables count")
    with pytest.raises(ConfigError, match=str(path)):
        read_settings({}, environ)


def test_the_file_of_the_system_may_be_missing_but_not_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shardboot.toml"
    monkeypatch.setattr(start, "DEFAULT_CONFIG_FILE", path)
    assert read_settings({}, {}).vllm == "vllm"
    path.write_text(FILE)
    assert read_settings({}, {}).vllm == "/opt/file"
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=str(path)):
        read_settings({}, {})


def taken(path: Path, **more: str) -> dict[str, str]:
    environ = {"SHARDBOOT_HF_TOKEN_FILE": str(path), "A": "b", **more}
    take_credentials(environ)
    return environ


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_secret_in_a_file_goes_where_others_look_for_it(tmp_path: Path, end: str) -> None:
    path = tmp_path / "token"
    path.write_text(f"hf a+/={end}", newline="")
    assert taken(path) == {"A": "b", "HF_TOKEN": "hf a+/="}
    assert taken(path, HF_TOKEN="") == {"A": "b", "HF_TOKEN": "hf a+/="}


def test_a_variable_that_is_empty_names_no_file() -> None:
    environ = {"SHARDBOOT_HF_TOKEN_FILE": "", "HF_TOKEN": "x"}
    take_credentials(environ)
    assert environ == {"HF_TOKEN": "x"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "No such file"),
        (b"", "found nothing"),
        (b"\n", "found nothing"),
        (b"hush\nhush\n", "found something else"),
        (b"hush\0", "found something else"),
        (b"\xffhush", "found something else"),
        (b"hush" * 10_000, "found something else"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused_by_name_and_not_repeated(
    tmp_path: Path, data: bytes | None, says: str
) -> None:
    path = tmp_path / "token"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"SHARDBOOT_HF_TOKEN_FILE: {path}: .*{says}") as caught:
        taken(path)
    assert exit_code_of(caught.value) == 10
    assert "hush" not in f"{caught.value} {caught.value.hint}"


def test_a_directory_holds_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        taken(tmp_path)


def test_a_secret_where_its_file_was_meant_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="absolute path") as caught:
        taken(Path("hf_hush"))
    assert "hush" not in f"{caught.value} {caught.value.hint}"


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hush")
    with pytest.raises(ConfigError, match="HF_TOKEN is set as well") as caught:
        taken(path, HF_TOKEN=path.read_text())
    assert "hush" not in str(caught.value)


def test_a_file_of_a_secret_has_no_setting_for_a_namesake() -> None:
    names = {f"SHARDBOOT_{name}_FILE" for name in CREDENTIALS}
    assert names.isdisjoint({start.CONFIG_FILE, *(option.variable for option in OPTIONS)})
    read_settings({}, dict.fromkeys(names, "/run/secrets/x"))
    with pytest.raises(ConfigError) as caught:
        read_settings({}, {"SHARDBOOT_HF_TOKN_FILE": "/run/secrets/x"})
    assert caught.value.hint == "did you mean SHARDBOOT_HF_TOKEN_FILE?"


@pytest.mark.parametrize("begin", ["new_boot", "settings_as_user"])
def test_secrets_are_read_before_root_is_dropped(tmp_path: Path, begin: str) -> None:
    path = tmp_path / "token"
    path.write_text("hush")
    environ = {"SHARDBOOT_HF_TOKEN_FILE": str(path), "SHARDBOOT_USER": "no-such-user"}
    umask = os.umask(0o022)
    try:
        with pytest.raises(PrivilegeError):
            new_boot({}, (), environ) if begin == "new_boot" else settings_as_user({}, environ)
    finally:
        os.umask(umask)
    assert environ["HF_TOKEN"] == path.read_text()
