"""What counts as a secret, and what is left of a text that repeats one."""

from __future__ import annotations

import pytest

from entrypoint.config import CREDENTIALS
from entrypoint.redaction import redact, secrets

TEXT = "hush-hush"
LINES = " -----BEGIN\r\nfirst line\nsecond line \n"


@pytest.mark.parametrize(
    ("environ", "words", "found"),
    [
        ({}, [], []),
        *(({name: TEXT}, [], [TEXT]) for name in CREDENTIALS),
        *(({f"MY_{end}": TEXT}, [], [TEXT]) for end in ("TOKEN", "KEY", "SECRET", "PASSWORD")),
        ({"github_token": TEXT}, [], [TEXT]),
        ({"KEY_FILE": TEXT, "TOKENS": TEXT, "HOME": TEXT}, [], []),
        ({"A_KEY": "1234567", "B_KEY": "", "C_KEY": "12345678"}, [], ["12345678"]),
        ({"A_KEY": LINES}, [], ["second line", "-----BEGIN", "first line"]),
        ({}, ["m", "--api-key", TEXT, "-tp", "2"], [TEXT]),
        ({}, ["--api-key", TEXT, "another one", "--host", "somewhere"], ["another one", TEXT]),
        ({}, [f"--api-key={TEXT}", "/models/llama"], [TEXT]),
        ({}, ["--api_key", TEXT, f"--hf_token={TEXT}s"], [f"{TEXT}s", TEXT]),
        ({}, ["--hf-token", TEXT, "/models/llama"], [TEXT]),
        ({}, ["--hf-token", "--api-key", "-tp", "/models/llama"], []),
        ({"HF_TOKEN": TEXT}, ["--hf-token", TEXT], [TEXT]),
    ],
)
def test_a_secret_is_known_by_the_name_of_a_variable_or_a_word_of_vllms(
    environ: dict[str, str], words: list[str], found: list[str]
) -> None:
    assert sorted(secrets(environ, words)) == sorted(found)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("nothing of it", "nothing of it"),
        (f"Bearer {TEXT}: 401", "Bearer ***: 401"),
        (f"{TEXT}{TEXT} a.b*c+d\udcff", "****** ***"),
        (f"{TEXT}-and-more, {TEXT}-and", "***, ***-and"),
    ],
)
def test_no_part_of_a_secret_is_left(text: str, left: str) -> None:
    environ = {"A_KEY": TEXT, "B_KEY": f"{TEXT}-and-more", "C_KEY": "a.b*c+d\udcff"}
    assert redact(text, secrets(environ, [])) == left


def test_without_secrets_a_text_is_what_it_was() -> None:
    assert redact("any text", []) == "any text"
