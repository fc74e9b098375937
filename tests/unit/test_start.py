"""What a command starts with: the file that is there, and what counts when switched off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint import start
from entrypoint.errors import ConfigError
from entrypoint.start import read_settings, read_vllm_and_user

FILE = 'vllm = "/opt/file"\nuser = 2000\n'


@pytest.mark.parametrize(
    ("text", "environ", "flags", "found"),
    [
        ("", {}, {}, ("vllm", None)),
        (FILE, {}, {}, ("/opt/file", "2000")),
        (FILE, {"SHARDBOOT_VLLM": "/opt/variable"}, {}, ("/opt/variable", "2000")),
        (FILE, {"SHARDBOOT_USER": "3000"}, {"vllm": "/opt/flag"}, ("/opt/flag", "3000")),
        (FILE, {"SHARDBOOT_USER": "3000"}, {"user": "4000"}, ("/opt/file", "4000")),
        (FILE, {"SHARDBOOT_USER": ""}, {"user": None}, ("/opt/file", None)),
        (f'on_mis = 1\n{FILE}file_mode = "0666"', {"SHARDBOOT_X": "x"}, {}, ("/opt/file", "2000")),
    ],
)
def test_switched_off_the_two_settings_that_count_are_read_as_ever_and_no_other(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    environ: dict[str, str],
    flags: Mapping[str, str | None],
    found: tuple[str, str | None],
) -> None:
    path = tmp_path / "shardboot.toml"
    path.write_text(text)
    assert read_vllm_and_user(flags, environ | {"SHARDBOOT_CONFIG_FILE": str(path)}) == found
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("data", [b"vllm = ", b"\xff\xfe", b"a = " + b"[" * 10_000, None])
def test_switched_off_a_file_that_is_broken_is_said_and_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], data: bytes | None
) -> None:
    path = tmp_path / "shardboot.toml"
    if data is not None:
        path.write_bytes(data)
    environ = {"SHARDBOOT_CONFIG_FILE": str(path), "SHARDBOOT_USER": "2000"}
    assert read_vllm_and_user({"vllm": "/opt/flag"}, environ) == ("/opt/flag", "2000")
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
