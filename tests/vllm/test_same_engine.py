"""What the loader does in the engine itself: compares it with the key, and loads weights again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_key

from entrypoint.errors import KeyMismatchError
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections

pytestmark = pytest.mark.vllm


def told(arguments: dict[str, Any], **more: str) -> dict[str, Any]:
    """Return engine arguments of which the loader is told more than its manifest."""
    extra = arguments["model_loader_extra_config"] | more
    return arguments | {"model_loader_extra_config": extra}


@pytest.fixture(scope="module")
def dense(lab: Any) -> Any:
    return lab.checkpoint("dense")


def test_weights_are_loaded_again_in_place_from_the_source(lab: Any, dense: Any) -> None:
    checkpoint, _, arguments = dense
    source = str(lab.model("dense"))
    served = lab.engine(checkpoint, "served", **arguments)
    again = lab.engine(checkpoint, "again", reload=True, **told(arguments, source=source))
    assert again.done, again.said[-4000:]
    assert again.tokens == served.tokens
    assert again.logprobs == served.logprobs


def test_without_a_source_at_hand_it_says_so_before_anything_is_touched(
    lab: Any, dense: Any
) -> None:
    checkpoint, _, arguments = dense
    found = lab.engine(checkpoint, "alone", reload=True, **arguments)
    assert not found.done
    assert "a checkpoint, whose source is not at hand to reload weights from" in found.said


def test_another_engine_loads_the_source_and_boot_is_to_ask_vllm_anew(
    lab: Any, dense: Any, tmp_path: Path
) -> None:
    checkpoint, manifest, arguments = dense
    # Of the same names, shapes and dtypes: nothing but the key tells.
    other = {"hf_overrides": {"rope_theta": 20000.0}}
    Memory(tmp_path).remember("resolutions", "question", {"stale": True})
    settings = {"source": str(lab.model("dense")), "state": str(tmp_path), "boot": "b"}
    found = lab.engine(checkpoint, "other", **told(arguments, **settings), **other)
    source = lab.engine(lab.model("dense"), "source", **other)
    assert found.tokens == source.tokens
    (objection,) = (e for e in Ledger(tmp_path).entries() if e["event"] == "objection")
    assert "it was made for hf_overrides" in str(objection["text"])
    assert Rejections(tmp_path).find(manifest.content) is None
    assert Memory(tmp_path).recall("resolutions", "question") is None


def test_a_variable_that_this_vllm_has_no_more_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from entrypoint.vllm_plugin import resolved_key, same_engine

    def told(config: Any, engine: Any, environ: Any) -> dict[str, Any]:
        names = engine["env_names"]
        found = resolved_key._backends(config, names, environ, moe=False, ep=False)
        return {"backends": found}

    monkeypatch.setattr(resolved_key, "key", told)
    key = make_key(backends={"VLLM_MOE_OF_OLD": "1"})
    with pytest.raises(KeyMismatchError, match="VLLM_MOE_OF_OLD"):
        same_engine.require_same_engine(key, SimpleNamespace())
