"""What log lines look like, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.log import Form, form_of
from entrypoint.start import unchecked_log


@pytest.mark.parametrize(
    ("setting", "is_daemon", "is_terminal", "form"),
    [
        ("auto", True, True, "bars"),
        ("auto", True, False, "json"),
        ("auto", False, True, "bars"),
        ("auto", False, False, "text"),
        ("text", True, True, "text"),
        ("text", True, False, "text"),
        ("text", False, True, "text"),
        ("text", False, False, "text"),
        ("json", True, True, "json"),
        ("json", True, False, "json"),
        ("json", False, True, "json"),
        ("json", False, False, "json"),
        # A setting that is wrong is about to be said so.
        ("yaml", True, False, "json"),
        ("yaml", False, False, "text"),
    ],
)
def test_lines_are_for_people_on_a_terminal_and_json_where_a_daemon_has_none(
    setting: str, *, is_daemon: bool, is_terminal: bool, form: Form
) -> None:
    assert form_of(setting, is_daemon=is_daemon, is_terminal=is_terminal) == form


@pytest.mark.parametrize(
    ("text", "variable", "flag", "is_json"),
    [
        ("", None, None, True),
        ("log-format = 'text'", None, None, False),
        ("log_format = 'text'", None, None, False),
        ("log-format = 'text'", "json", None, True),
        ("log-format = 'json'", "json", "text", False),
        ("log-format = 'text'\non-mis = 1", None, None, False),
        ("log-format = 'text", None, None, True),
        ("log-format = 1", None, None, True),
    ],
)
def test_what_keeps_settings_from_being_read_is_told_in_the_format_that_they_ask_for(
    tmp_path: Path, text: str, variable: str | None, flag: str | None, *, is_json: bool
) -> None:
    path = tmp_path / "shardboot.toml"
    path.write_text(text)
    environ = {"SHARDBOOT_CONFIG_FILE": str(path)}
    if variable is not None:
        environ["SHARDBOOT_LOG_FORMAT"] = variable
    # Captured, stderr is no terminal.
    log = unchecked_log({"log_format": flag}, environ, is_daemon=True)
    assert log.as_json is is_json
