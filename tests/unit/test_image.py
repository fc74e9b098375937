"""What the words after an image's name mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.image import enter


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ([], ["serve"]),
        (["org/model", "-tp", "8"], ["serve", "org/model", "-tp", "8"]),
        (["--model", "org/model"], ["serve", "--model", "org/model"]),
        (["--help"], ["serve", "--help"]),
        (["serve", "org/model"], ["serve", "org/model"]),
        (["vllm", "serve", "org/model"], ["serve", "org/model"]),
        (["plan", "org/model"], ["plan", "org/model"]),
        (["gc", "--dry-run"], ["gc", "--dry-run"]),
        (["gpt2"], ["serve", "gpt2"]),
        (["/usr"], ["serve", "/usr"]),
        ([""], ["serve", ""]),
    ],
    ids=" ".join,
)
def test_words_that_name_no_program_are_ours(words: list[str], ours: list[str]) -> None:
    assert enter(words, {"PATH": "/usr/bin:/bin"}) == (tuple(ours), None, "")


def test_a_program_on_path_or_as_a_path_is_run_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = (("-c", "x"), str(program), "")
    assert enter(["tool", "-c", "x"], {"PATH": str(tmp_path)}) == found
    assert enter([str(program), "-c", "x"], {"PATH": "/nowhere"}) == found


@pytest.mark.parametrize(
    ("begin", "is_program"),
    [(b"#!/bin/sh\n", True), (b"\x7fELF\2\1", True), (b"GGUF\3", False), (b"", False)],
)
def test_a_path_is_a_program_by_its_first_bytes_and_not_by_an_x_bit(
    tmp_path: Path, begin: bytes, is_program: bool
) -> None:
    # On CIFS every file may be executed.
    model = tmp_path / "model.gguf"
    model.write_bytes(begin)
    model.chmod(0o755)
    words, program, _ = enter([str(model), "-tp", "2"], {"PATH": "/nowhere"})
    assert program == (str(model) if is_program else None)
    assert words == (("-tp", "2") if is_program else ("serve", str(model), "-tp", "2"))


@pytest.mark.parametrize("word", ["-h", "--help", "--help=all", "--help=max-model-len"])
def test_vllms_help_is_asked_of_vllm(tmp_path: Path, word: str) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    found = (("serve", word), str(vllm), "")
    assert enter(["vllm", "serve", word], {"PATH": str(tmp_path)}) == found


def test_our_own_commands_win_over_programs_of_their_name(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("#!/bin/sh\n")
    (tmp_path / "list").chmod(0o755)
    assert enter(["list"], {"PATH": str(tmp_path)}) == (("list",), None, "")


@pytest.mark.parametrize(
    ("model", "near"),
    [
        *[("lst", "list"), ("statsu", "status"), ("helath", "health"), ("serv", "serve")],
        *[("Plan", "plan"), ("verfy", "verify")],
        *[("gpt2", ""), ("phi", ""), ("qwen", ""), ("./lst", ""), ("org/lst", ""), ("", "")],
    ],
)
def test_a_model_with_nearly_the_name_of_a_command_is_one_and_may_be_a_slip(
    model: str, near: str
) -> None:
    assert enter([model, "-tp", "2"], {"PATH": "/nowhere"}) == (
        ("serve", model, "-tp", "2"),
        None,
        near,
    )


def test_a_directory_with_nearly_the_name_of_a_command_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lst").mkdir()
    assert enter(["lst"], {"PATH": "/nowhere"}).near == ""
