"""Whether vLLM reads a checkpoint's files alike, where it cannot be found out."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.vllm_plugin import resolve


class Model(SimpleNamespace):
    """What vLLM says of a model."""

    def try_get_generation_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "error", [KeyError("weights"), RuntimeError("weights"), OSError(28, "No space left on device")]
)
def test_whatever_vllm_raises_for_want_of_weights_is_a_doubt_that_does_not_last(
    tmp_path: Path, error: Exception
) -> None:
    def fail(_: argparse.Namespace) -> None:
        raise error

    model = Model(
        model=str(tmp_path),
        tokenizer=str(tmp_path),
        hf_config=None,
        hf_text_config=None,
        architecture="LlamaForCausalLM",
        quantization=None,
        tokenizer_mode="hf",
        runner_type="generate",
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    args = argparse.Namespace(
        model=str(tmp_path), tokenizer_mode="hf", tokenizer_revision=None, revision=None
    )
    asker: Any = SimpleNamespace(config=fail)
    found = resolve._reread(asker, args, SimpleNamespace(model_config=model))
    assert found == ([], f"vLLM cannot read a checkpoint's files: {error}", True)
