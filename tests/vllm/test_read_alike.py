"""What vLLM finds out from the weights of a model, and a checkpoint's files tell as well.

By the names of Mistral's own weights it knows how config and tokenizer are written, and by their
headers the dtype, where the config says none.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from processes import run
from serving import FLAGS, environment

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.vllm

CHILD = Path(__file__).with_name("resolve_child.py")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("mistral")
    make_model("mistral", directory / "own")
    make_model("dense", directory / "silent", layers=1)
    say_no_dtype(directory / "silent")
    make_model("dense", directory / "beside", layers=1)
    # Nobody but vLLM looks there, and it looks for names alone.
    (directory / "beside" / "original").mkdir()
    (directory / "beside" / "original" / "consolidated.safetensors").touch()
    (directory / "beside" / "tekken.json").write_text("{}")
    make_model("dense", directory / "untied", layers=1)
    claim_to_be_tied(directory / "untied")
    make_model("bert", directory / "pools")
    yield directory
    shutil.rmtree(directory)


def claim_to_be_tied(model: Path) -> None:
    """Let the config say so of a model that has an `lm_head` of its own."""
    config = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (model / "config.json").write_text(json.dumps(config))


def say_no_dtype(model: Path) -> None:
    """Leave it to the weights to say that they are float16."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    path = model / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


@pytest.fixture(scope="module")
def recipes(room: Path, lab: Any) -> dict[str, dict[str, Any]]:
    # Rows of its head are the classifier: those of these tokens.
    tokens = ["--hf-overrides", '{"classifier_from_token": ["a", "b"]}']
    asked = {
        "own": [str(room / "own"), "--max-model-len", "256"],
        "silent": [str(room / "silent")],
        "beside": [str(room / "beside")],
        "classifier": [str(room / "silent"), *tokens],
        "untied": [str(room / "untied")],
        "pools": [str(room / "pools"), "--pooler-config", '{"use_activation": false}'],
        "of others": [str(room / "silent"), *tokens, "--tokenizer", str(room / "beside")],
    }
    result = room / "answers.json"
    said = lab.run([sys.executable, "-P", str(CHILD), str(result)], [*asked.values()])
    assert result.exists(), said[-4000:]
    answers = json.loads(result.read_text())
    return {form: answer["words"] for form, answer in zip(asked, answers, strict=True)}


def test_a_checkpoint_is_read_as_its_source_where_it_has_the_same_names(
    recipes: dict[str, dict[str, Any]],
) -> None:
    assert (recipes["own"]["why"], recipes["own"]["pinned"]) == ("", [])


def test_a_dtype_that_only_the_weights_tell_is_put_into_words(
    recipes: dict[str, dict[str, Any]],
) -> None:
    assert recipes["silent"]["why"] == ""
    assert recipes["silent"]["pinned"] == ["--dtype", "float16"]


@pytest.mark.parametrize("form", ["untied", "pools"])
def test_what_a_load_reproduces_and_what_vllm_writes_into_the_words_are_no_difference(
    recipes: dict[str, dict[str, Any]], form: str
) -> None:
    assert (recipes[form]["why"], recipes[form]["pinned"]) == ("", [])


def test_whatever_else_would_be_read_differently_is_named_and_no_checkpoint_made(
    recipes: dict[str, dict[str, Any]],
) -> None:
    assert not recipes["beside"]["verified"]
    assert recipes["beside"]["why"] == "vLLM would read tokenizer_mode of a checkpoint differently"


def test_weights_that_another_tokenizer_chooses_are_not_served_from_a_checkpoint(
    recipes: dict[str, dict[str, Any]],
) -> None:
    assert recipes["classifier"]["verified"]
    why = recipes["of others"]["why"]
    assert why == "the tokenizer that the words name decides about weights"


@pytest.mark.parametrize("form", ["own", "untied"])
def test_a_checkpoint_whose_weights_vllm_would_look_at_answers_as_its_source(
    room: Path, lab: Any, form: str
) -> None:
    command = [str(Path(sys.executable).with_name("shardboot")), "save"]
    words = [str(room / form), *FLAGS]
    environ = environment(tp=1) | {
        "SHARDBOOT_LOCAL_DIR": str(room / f"{form}-checkpoints"),
        "SHARDBOOT_STATE_DIR": str(room / f"{form}-state"),
    }
    status, _ = run([*command, *words], environ, room / f"{form}.log")
    assert status == 0, (room / f"{form}.log").read_text()
    (found,) = (room / f"{form}-checkpoints").glob(f"*/{MANIFEST}")
    manifest = manifests.decode(found.read_bytes())
    assert (room / form / "config.json").exists() == (form != "own")
    loading = {
        "load_format": "shardboot",
        "model_loader_extra_config": {"manifest": manifest.digest},
    }
    source = lab.engine(room / form, f"{form}-source")
    served = lab.engine(found.parent, f"{form}-served", **loading)
    # With the other tokenizer that lies there, the very prompts would be other tokens.
    assert served.tokens == source.tokens
    assert served.state == source.state
