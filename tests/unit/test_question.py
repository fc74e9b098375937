from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint.checkpoint.digest import Json
from entrypoint.engine.executable import Executable
from entrypoint.engine.question import distributions, named_files, question
from entrypoint.engine.words import kept_positions

IGNORABLE: dict[str, Json] = {
    "--host": 1,
    "--api-key": "*",
    "--served-model-name": "+",
    "--disable-log-stats": 0,
    "--root-path": "?",
    "--pair": 2,
}
ENGINE = Executable("/usr/bin/vllm", "/bin/sh")


def kept(*words: str) -> list[str]:
    return [words[position] for position in kept_positions(words, IGNORABLE)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["m", "--host", "a", "-tp", "2"], ["m", "-tp", "2"]),
        (["m", "--host=a", "x"], ["m", "x"]),
        (["--disable-log-stats", "m"], ["m"]),
        (["m", "--api-key", "a", "b", "-tp", "2"], ["m", "-tp", "2"]),
        (["m", "--api-key", "-tp", "2"], ["m", "-tp", "2"]),
        (["m", "--api-key"], ["m"]),
        (["m", "--api-key=a", "b"], ["m", "b"]),
        (["m", "--served-model-name", "a", "b"], ["m"]),
        (["--root-path", "m", "x"], ["x"]),
        (["--pair", "a", "b", "c"], ["c"]),
        (["--host", "--port"], ["--port"]),
        (["m", "--hos", "a"], ["m", "--hos", "a"]),
        (["m", "--served_model_name", "a"], ["m", "--served_model_name", "a"]),
        (["m", "--HOST", "a"], ["m", "--HOST", "a"]),
        (["m", "--", "--host", "a"], ["m", "--", "--host", "a"]),
        (["m", "--host.x", "a"], ["m", "--host.x", "a"]),
        ([], []),
    ],
    ids=" ".join,
)
def test_only_exact_spellings_with_their_values_are_left_out(
    words: list[str], expected: list[str]
) -> None:
    assert kept(*words) == expected


def digest(
    *words: str,
    environ: dict[str, str] | None = None,
    engine: Executable = ENGINE,
    env_names: tuple[str, ...] = ("VLLM_X",),
    site_dirs: tuple[str, ...] = (),
) -> str:
    about: dict[str, Json] = {
        "env_names": list(env_names),
        "ignorable": IGNORABLE,
        "site_dirs": list(site_dirs),
    }
    return f"{question(engine, words, environ or {}, about)}{named_files(words, IGNORABLE)}"


def test_words_that_do_not_matter_do_not_change_the_question() -> None:
    plain = digest("m", "-tp", "2")
    assert digest("m", "--host", "a", "-tp", "2") == plain
    assert digest("--disable-log-stats", "m", "-tp", "2", "--api-key", "x", "y") == plain


@pytest.mark.parametrize(
    "words",
    [
        *(["m"], ["m", "-tp", "4"], ["-tp", "2", "m"], ["m", "-tp=2"], ["m", "-tp", "2", ""]),
        *(["m", "-tp", "2", "-tp", "2"], ["m", "-tp", "2", "--hos", "a"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_other_word_does(words: list[str]) -> None:
    assert digest(*words) != digest("m", "-tp", "2")


def test_whether_a_served_name_is_there_counts_and_which_does_not() -> None:
    assert digest("m", "--served-model-name", "a") != digest("m")
    assert digest("m", "--served-model-name", "a") == digest("m", "--served-model-name", "b", "c")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"VLLM_X": "1"}, {}),
        ({"VLLM_X": "1"}, {"VLLM_X": "2"}),
        ({"VLLM_X": ""}, {}),
        ({"HF_HOME": "/a"}, {"HF_HOME": "/b"}),
        ({"HF_HUB_OFFLINE": "1"}, {}),
        ({"VLLM_PLUGINS": "a"}, {"VLLM_PLUGINS": "b"}),
        ({"PYTHONPATH": "/a"}, {}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_variables_that_vllm_reads_count(left: dict[str, str], right: dict[str, str]) -> None:
    assert digest("m", environ=left) != digest("m", environ=right)


def test_other_variables_do_not_count() -> None:
    assert digest("m", environ={"HOSTNAME": "a", "VLLM_Y": "1"}) == digest("m")


@pytest.mark.parametrize(
    "word",
    [
        "{path}",
        "--config={path}",
        '--hf-overrides={{"a": [{{"b": "{path}"}}]}}',
        '{{"a": "{path}"}}',
    ],
    ids=["alone", "after =", "inside JSON", "JSON alone"],
)
def test_the_contents_of_a_file_that_a_word_names_count(tmp_path: Path, word: str) -> None:
    path = tmp_path / "config.yaml"
    words = ("m", word.format(path=path))
    absent = digest(*words)
    path.write_text("tensor-parallel-size: 2")
    two = digest(*words)
    path.write_text("tensor-parallel-size: 4")
    assert len({absent, two, digest(*words)}) == 3
    path.write_text("tensor-parallel-size: 2")
    assert digest(*words) == two


def test_the_config_of_a_directory_that_a_word_names_counts(tmp_path: Path) -> None:
    before = digest("m", "--tokenizer", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert digest("m", "--tokenizer", str(tmp_path)) != before


@pytest.mark.parametrize(
    "word",
    [
        *(
            "{broken/json",
            '{"a.b": ' + "[" * 100_000,
            "/" + "x" * 5000,
            "a.b",
            "--x=/dev/zero",
            "--x=",
            ".",
        ),
        "/\udcff",
    ],
    ids=lambda word: ascii(word[:14]),
)
def test_odd_words_are_just_words(word: str) -> None:
    assert digest("m", word) != digest("m")


def test_another_engine_is_another_question(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("")
    assert digest("m", engine=Executable("/opt/vllm", "/bin/sh")) != digest("m")
    assert digest("m", engine=Executable("/usr/bin/vllm", str(other))) != digest("m")


def test_what_plugs_into_vllm_or_reads_models_for_it_counts_and_nothing_else(
    tmp_path: Path,
) -> None:
    names = ("vllm-0.32.0", "torch-2.13.0", "requests-2.31", "plug-1.0", "shardboot-0.1.0")
    for name in (*names, "transformers-5.0", "compressed_tensors-0.9", "mistral_common-1.13"):
        (tmp_path / f"{name}.dist-info").mkdir()
    plug = tmp_path / "plug-1.0.dist-info" / "entry_points.txt"
    plug.write_text("[vllm.general_plugins]\nx = y:z\n")
    assert distributions([str(tmp_path), "/none/such"]) == [
        *("compressed_tensors-0.9.dist-info", "mistral_common-1.13.dist-info"),
        *("plug-1.0.dist-info", "shardboot-0.1.0.dist-info"),
        *("torch-2.13.0.dist-info", "transformers-5.0.dist-info", "vllm-0.32.0.dist-info"),
    ]
    before = digest("m", site_dirs=(str(tmp_path),))
    (tmp_path / "plug-1.0.dist-info").rename(tmp_path / "plug-1.1.dist-info")
    assert digest("m", site_dirs=(str(tmp_path),)) != before


def test_the_question_holds_no_word_of_the_users() -> None:
    assert json.dumps(digest("secret-model")).strip('"').isalnum()
    assert "secret" not in digest("secret-model")


def test_a_linked_file_counts_by_what_it_links_to(tmp_path: Path) -> None:
    """As in a Kubernetes ConfigMap, where every file is a link through a link."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "serve.yaml").write_text(f"model: {version}")
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "serve.yaml").symlink_to("data/serve.yaml")
    before = digest("--config", str(tmp_path / "serve.yaml"))
    (tmp_path / "data").unlink()
    (tmp_path / "data").symlink_to("v2")
    assert digest("--config", str(tmp_path / "serve.yaml")) != before


def test_a_file_that_a_yaml_file_names_counts(tmp_path: Path) -> None:
    named = tmp_path / "overrides.json"
    named.write_text("1")
    (tmp_path / "serve.yaml").write_text(f"hf-overrides: {named}")
    before = digest("--config", str(tmp_path / "serve.yaml"))
    named.write_text("2")
    assert digest("--config", str(tmp_path / "serve.yaml")) != before
