"""What vLLM's own parser makes of a command line, and how it is turned into a checkpoint's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoint.checkpoint.key import FORMAT, Key

pytestmark = pytest.mark.vllm

RESOLVE = Path(__file__).parents[2] / "entrypoint" / "vllm_plugin" / "resolve.py"
CHILD = Path(__file__).with_name("resolve_child.py")
SECRET = "s3cret"  # noqa: S105 - that is the point

# Where the words name the model, as indices; MODEL stands for its directory, DRAFT for a copy.
SPELLED = {
    "positional": (["MODEL", "-tp", "2"], [0]),
    "positional-last": (["--enforce-eager", "MODEL"], [1]),
    "option": (["--dtype", "bfloat16", "--model", "MODEL"], [2, 3]),
    "option-equals": (["--model=MODEL", "--enforce-eager"], [0]),
    "yaml": (["--config", "WITH_MODEL"], []),
    "yaml-beside": (["MODEL", "--config", "WITHOUT_MODEL"], [0]),
    "yaml-beside-option": (["--model", "MODEL", "--config", "WITHOUT_MODEL"], [0, 1]),
    "same-tokenizer": (["--tokenizer", "MODEL", "--model", "MODEL"], [2, 3]),
    "names": (["MODEL", "--served-model-name", "a", "b"], [0]),
    "name-underscored": (["MODEL", "--served_model_name=a"], [0]),
    "dotted": (["MODEL", "--hf-overrides.rope_theta", "20000"], [0]),
    "api-key": (["MODEL", "--api-key", SECRET, "--port", "8123"], [0]),
}
DRAFT = {"model": "DRAFT", "num_speculative_tokens": 2, "method": "draft_model"}
OTHERS = {
    "draft": ["MODEL", "--speculative-config", json.dumps(DRAFT)],
    "draft-dotted": [
        "MODEL",
        *("--speculative-config.model", "DRAFT", "--speculative-config.method", "draft_model"),
        *("--speculative-config.num_speculative_tokens", "2"),
    ],
    "ngram": [
        "MODEL",
        *("--speculative-config.method=ngram", "--speculative-config.num_speculative_tokens=2"),
    ],
    "extra": ["MODEL", "--model-loader-extra-config.x", "1"],
    "replicas": ["MODEL", "--data-parallel-size", "2"],
    "node": [
        "MODEL",
        *("--nnodes", "2", "--node-rank", "1", "-tp", "2", "--headless"),
        *("--master-addr", "127.0.0.1"),
    ],
    "moe": ["MOE", "-tp", "2", "--enable-expert-parallel"],
    "awq": ["AWQ"],
    "unknown": ["MODEL", "--api-kye", SECRET],
    "indivisible": ["MODEL", "-tp", "3"],
    "no-file": ["MODEL", "--config", "/nowhere.yaml"],
    "help": ["--help"],
}


@pytest.fixture(scope="module")
def answers(lab: Any) -> dict[str, dict[str, Any]]:
    """Ask for all of them at once: an import of vLLM each would take minutes."""
    with_model, without = lab.room / "with.yaml", lab.room / "without.yaml"
    without.write_text("dtype: bfloat16\nmax-model-len: 256\n")
    with_model.write_text(f"model: {lab.model('dense')}\nserved-model-name: foo\n")
    places = {"WITH_MODEL": with_model, "WITHOUT_MODEL": without, "MODEL": lab.model("dense")}
    places |= {"DRAFT": lab.model("tied"), "MOE": lab.model("moe"), "AWQ": lab.model("awq")}

    def put(word: str) -> str:
        for name, path in places.items():
            word = re.sub(rf"\b{name}\b", str(path), word)
        return word

    asked = {name: words for name, (words, _) in SPELLED.items()} | OTHERS
    lists = [[put(word) for word in words] for words in asked.values()]
    result = lab.room / "resolved.json"
    said = lab.run([sys.executable, "-P", str(CHILD), str(result)], lists)
    assert result.exists(), said[-4000:]
    return dict(zip(asked, json.loads(result.read_text()), strict=True))


@pytest.mark.parametrize("name", SPELLED)
def test_words_of_the_model_are_found_by_asking(name: str, answers: Any) -> None:
    answer = answers[name]
    assert answer["status"] == "ok", answer
    assert answer["words"]["drop"] == SPELLED[name][1]
    assert answer["words"]["verified"], answer["words"]["why"]
    assert answer["words"]["served_name"] == (name in ("yaml", "names", "name-underscored"))


def test_key_is_one_that_the_checkpoint_room_reads(answers: Any) -> None:
    for name in ("positional", "moe", "awq", "node", "draft"):
        beside = {"model": "", "format": FORMAT, "engine": "vllm"}
        key = Key.from_json(answers[name]["key"] | beside)
        assert key.platform.startswith("cpu-")
        assert key.vllm == answers[name]["engine"]["vllm"]


def test_key_and_kind_follow_the_model(answers: Any) -> None:
    moe, awq = answers["moe"], answers["awq"]
    assert (moe["kind"]["moe"], moe["kind"]["quantized"]) == (True, False)
    assert (moe["key"]["ep"], moe["key"]["tp"], moe["layout"]["world"]) == (True, 2, 2)
    assert (awq["kind"]["moe"], awq["kind"]["quantized"]) == (False, True)
    assert awq["key"]["quantization"]
    assert len(awq["key"]["quantization_config"]) == 64
    assert answers["dotted"]["key"]["hf_overrides"]
    assert not answers["positional"]["key"]["hf_overrides"]


def test_replicas_of_a_dense_model_share_a_key(answers: Any) -> None:
    replicas = answers["replicas"]
    assert replicas["layout"]["dp"] == 2
    assert replicas["key"] == answers["option-equals"]["key"]


def test_a_headless_node_knows_its_place(answers: Any) -> None:
    layout = answers["node"]["layout"]
    assert (layout["nnodes"], layout["node_rank"], layout["world"]) == (2, 1, 2)
    assert (layout["ranks"], layout["unplaced"]) == ([1], "")
    assert layout["headless"]


def test_a_separate_draft_keeps_its_own_load_format(answers: Any) -> None:
    for name in ("draft", "draft-dotted"):
        words = answers[name]["words"]
        assert words["verified"], words["why"]
        assert answers[name]["kind"]["draft"] == "separate"
    # The JSON is the user's own: boot adds to it, and no memory holds it.
    assert answers["draft"]["words"]["draft_in"] == 2
    assert answers["draft"]["words"]["speculative"] == []
    assert answers["draft-dotted"]["words"]["speculative"][0].startswith("--speculative-config.")
    assert answers["ngram"]["kind"]["draft"] == "none"
    assert answers["ngram"]["words"]["speculative"] == []


def test_what_vllm_would_read_otherwise_is_said(answers: Any) -> None:
    answer = answers["extra"]
    assert answer["load"]["extra_config"]
    assert not answer["words"]["verified"]
    assert "model_loader_extra_config" in answer["words"]["why"]


def test_rejections_are_vllms_own_words(answers: Any) -> None:
    said = {name: answers[name]["message"] for name in ("indivisible", "no-file", "unknown")}
    assert "must be divisible by tensor parallel size (3)" in said["indivisible"]
    assert "/nowhere.yaml" in said["no-file"]
    assert said["unknown"].endswith("unrecognized arguments: --api-kye")
    assert answers["help"]["status"] == "rejected"


def test_no_answer_holds_a_credential(answers: Any) -> None:
    assert SECRET not in json.dumps(answers)


def test_options_that_do_not_matter_come_with_their_number_of_values(answers: Any) -> None:
    ignorable = answers["positional"]["engine"]["ignorable"]
    assert ignorable["--port"] == 1
    assert ignorable["--api-key"] == "+"
    assert ignorable["--disable-log-stats"] == 0
    assert "--tensor-parallel-size" not in ignorable


def test_environment_names_leave_out_addresses_but_not_where_models_come_from(answers: Any) -> None:
    names = answers["positional"]["engine"]["env_names"]
    assert {"VLLM_MODEL_REDIRECT_PATH", "VLLM_USE_MODELSCOPE", "VLLM_PP_LAYER_PARTITION"} <= {
        *names
    }
    assert not {"VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP"} & {*names}
    assert names == sorted(names)


def test_run_by_path_without_our_package_it_says_that_the_plugin_is_missing(lab: Any) -> None:
    # -S with vLLM's site-packages put back by hand: no .pth file, so no editable install of ours.
    site = next(entry for entry in sys.path if entry.endswith("site-packages"))
    words = [str(lab.model("dense")), "--dtype", "bfloat16"]
    answer = lab.ask(
        [sys.executable, "-P", "-S", str(RESOLVE)],
        {"words": words},
        {"PYTHONPATH": site, "VLLM_MOE_USE_DEEP_GEMM": "0", "VLLM_PLUGINS": ""},
    )
    assert answer["status"] == "ok"
    assert answer["engine"]["plugin"] is None
    assert answer["key"]["backends"] == {"VLLM_MOE_USE_DEEP_GEMM": "False"}
