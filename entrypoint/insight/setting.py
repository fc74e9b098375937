"""One setting in the TOML file, changed by a line: all else stays as its author wrote it."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Final

from entrypoint.errors import ConfigError, OwnershipError
from entrypoint.state.files import write_atomically

NEW_FILE_MODE: Final = 0o644


def with_setting(text: str, key: str, value: str) -> str:
    """Return TOML `text` with `key = "value"`: in the line that has it, else in one at the end.

    The key may be spelled with underscores, too. Raises: ValueError where no such change is to be
    had: the text is no TOML, or has tables, or the key where no line begins.
    """
    before = tomllib.loads(text)
    name = f"({'[-_]'.join(map(re.escape, key.split('-')))})"
    line = re.compile(
        rf"""(?m)^([ \t]*["']?{name}["']?[ \t]*=[ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s#]+)"""
    )
    changed, count = line.subn(lambda found: f'{found[1]}"{value}"', text)
    if not count:
        end = "\r\n" if "\r\n" in text else "\n"
        gap = end if text and not text.endswith("\n") else ""
        changed = f'{text}{gap}{key} = "{value}"{end}'
    spelled = {each for each in (key, key.replace("-", "_")) if each in before} or {key}
    if tomllib.loads(changed) != before | dict.fromkeys(spelled, value):
        msg = f"no line of it can be changed to {key}"
        raise ValueError(msg)
    return changed


def require_writable(path: Path) -> None:
    """Refuse before anything is measured what could not be written afterwards.

    Raises: OwnershipError.
    """
    directory = path.resolve().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        what = "not a directory" if not directory.is_dir() else "this user may not write there"
        hint = "run it without --write, and put the line that it prints into the file yourself"
        raise OwnershipError(f"{directory}: {what}", hint=hint)


def write_setting(path: Path, key: str, value: str) -> Path:
    """Give `key` this value in the file at `path`, or in the one that a link there leads to.

    The file is replaced at once, mode and owner kept; made if there is none. Return its real path.
    Raises: ConfigError, OwnershipError; then it is as it was.
    """
    path = path.resolve()
    try:
        found = path.stat()
        # Ends of lines as they are.
        text = path.read_bytes().decode()
    except FileNotFoundError:
        found, text = None, ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        data = with_setting(text, key, value).encode()
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint=f'put {key} = "{value}" there') from None
    owner = None if found is None else (found.st_uid, found.st_gid)
    mode = NEW_FILE_MODE if found is None else stat.S_IMODE(found.st_mode)
    try:
        write_atomically(path, data, mode, owner=owner)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise OwnershipError(msg, hint=f'put {key} = "{value}" there') from None
    return path
