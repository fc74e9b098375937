"""One setting changed in the TOML file of somebody, who finds all else as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.errors import ConfigError, OwnershipError
from entrypoint.insight.setting import require_writable, with_setting, write_setting

KEY = "size-per-file"
SET = 'size-per-file = "2GiB"'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{SET}\n"),
        ('user = "vllm"', f'user = "vllm"\n{SET}\n'),
        ('# ours\nuser = "vllm"\n', f'# ours\nuser = "vllm"\n{SET}\n'),
        ('size-per-file = "4GiB"\n', f"{SET}\n"),
        (
            'size-per-file="4GiB" # slow disk\nuser = "x"\n',
            'size-per-file="2GiB" # slow disk\nuser = "x"\n',
        ),
        ("size-per-file = 4000\n", f"{SET}\n"),
        ("  size_per_file = '4 GiB'#x\n", '  size_per_file = "2GiB"#x\n'),
        ('"size-per-file" = "4GiB"\n', '"size-per-file" = "2GiB"\n'),
        ('size-per-file = "4GiB"\nsize_per_file = "8GiB"\n', f'{SET}\nsize_per_file = "2GiB"\n'),
        ('# size-per-file = "4GiB"\n', f'# size-per-file = "4GiB"\n{SET}\n'),
        ('user = "vllm"\r\n', f'user = "vllm"\r\n{SET}\r\n'),
        ('size-per-file = "4GiB"\r\n', f"{SET}\r\n"),
        ('size-per-file-x = "1"\n', f'size-per-file-x = "1"\n{SET}\n'),
    ],
)
def test_the_line_of_a_key_is_changed_else_one_is_added(before: str, after: str) -> None:
    assert with_setting(before, KEY, "2GiB") == after


@pytest.mark.parametrize(
    "text",
    [
        "user =\n",
        "[table]\nx = 1\n",
        'x = """\nsize-per-file = "4GiB"\n"""\n',
        'size-per-file = """4\nGiB"""\n',
        'size-per-file.x = "4GiB"\n',
    ],
)
def test_what_no_line_can_change_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        with_setting(text, KEY, "2GiB")


def test_the_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "shardboot.toml"
    real.write_text('user = "vllm"  # who\n')
    real.chmod(0o604)
    link.symlink_to(real)
    assert write_setting(link, KEY, "2GiB") == real
    assert link.is_symlink()
    assert real.read_text() == f'user = "vllm"  # who\n{SET}\n'
    assert real.stat().st_mode & 0o777 == 0o604
    assert sorted(tmp_path.iterdir()) == [real, link]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "shardboot.toml"
    path.touch()
    os.chown(path, 1234, 1235)
    write_setting(path, KEY, "2GiB")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


def test_a_file_that_is_not_there_is_made_for_all_to_read(tmp_path: Path) -> None:
    path = write_setting(tmp_path / "new.toml", KEY, "2GiB")
    assert (path.read_text(), path.stat().st_mode & 0o777) == (f"{SET}\n", 0o644)


@pytest.mark.parametrize("data", [b"user =\n", b"\xff\xfe"])
def test_a_file_that_is_no_toml_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "shardboot.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=str(path)):
        write_setting(path, KEY, "2GiB")
    assert path.read_bytes() == data
    assert [*tmp_path.iterdir()] == [path]


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.toml")
    with pytest.raises(OwnershipError, match="not a directory"):
        require_writable(tmp_path / "none" / "new.toml")
