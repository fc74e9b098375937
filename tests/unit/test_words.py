"""Where our options end and vLLM's words begin."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.commands import serve


def cut(words: list[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return what is ours, as far as it was given, and what is vLLM's."""
    context = serve.make_context("serve", list(words), obj={})
    ours = {name: value for name, value in context.params.items() if value is not None}
    return ours, context.obj["words"]


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ([], {}, ()),
        (["model"], {}, ("model",)),
        (["model", "-tp", "2"], {}, ("model", "-tp", "2")),
        (["-tp", "2", "model"], {}, ("-tp", "2", "model")),
        (["--local-dir", "/x", "model"], {"local_dir": "/x"}, ("model",)),
        (["--local-dir=/x", "model"], {"local_dir": "/x"}, ("model",)),
        (["--local-dir=", "model"], {"local_dir": ""}, ("model",)),
        (["--local-dir=a=b", "m"], {"local_dir": "a=b"}, ("m",)),
        (["model", "--local-dir", "/x"], {}, ("model", "--local-dir", "/x")),
        (["--port", "1", "--local-dir", "/x"], {}, ("--port", "1", "--local-dir", "/x")),
        (["--publish", "model"], {"publish": True}, ("model",)),
        (["--no-publish", "model"], {"publish": False}, ("model",)),
        (["--user", "--port", "model"], {"user": "--port"}, ("model",)),
        (["--user", "-1", "model"], {"user": "-1"}, ("model",)),
        (["--vllm", "--vllm", "model"], {"vllm": "--vllm"}, ("model",)),
        (["--checkpoint", "--", "model"], {"checkpoint": "--"}, ("model",)),
        (["--", "--local-dir", "/x"], {}, ("--local-dir", "/x")),
        (["--", "--", "x"], {}, ("--", "x")),
        (["--user", "1", "--", "m"], {"user": "1"}, ("m",)),
        (["model", "--", "x"], {}, ("model", "--", "x")),
        (["--local-d", "/x", "m"], {}, ("--local-d", "/x", "m")),
        (["--local_dir", "/x", "m"], {}, ("--local_dir", "/x", "m")),
        (["--user", "1", "--user", "2", "m"], {"user": "2"}, ("m",)),
        (["--served-model-name", "a", "b"], {}, ("--served-model-name", "a", "b")),
        ([""], {}, ("",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_first_word_that_is_not_ours_ends_ours(
    words: list[str], ours: dict[str, object], theirs: tuple[str, ...]
) -> None:
    assert cut(words) == (ours, theirs)


@pytest.mark.parametrize(
    "words", [["--local-dir"], ["--user", "1", "--vllm"], ["--publish=yes", "model"]]
)
def test_an_option_of_ours_without_its_value_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(click.UsageError) as caught:
        cut(words)
    assert caught.value.exit_code == 2


foreign = st.text(max_size=8).filter(lambda word: not word.startswith("--"))


@given(foreign, st.lists(st.text(max_size=8) | st.sampled_from(["--local-dir", "--", "--help"])))
def test_what_follows_a_foreign_word_is_never_touched(first: str, rest: list[str]) -> None:
    assert cut([first, *rest]) == ({}, (first, *rest))


@given(st.lists(st.text(max_size=8) | st.sampled_from(["--user", "--", "--help"])))
def test_what_follows_two_dashes_is_never_touched(rest: list[str]) -> None:
    assert cut(["--user", "1", "--", *rest]) == ({"user": "1"}, tuple(rest))
