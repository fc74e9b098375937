"""What the Dockerfile makes, and what the first word after the image's name does. A stub serves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container.harness import DATA, once
from container.image import ROOT, VLLM_HOME, base_of, build, last_line, limits, podman, try_to_build
from container.node import SERVICE, Node

from entrypoint import __version__

pytestmark = pytest.mark.container

NO_BOOT = f"{DATA}/state: no boot left a status\n"
SITE = f"{VLLM_HOME}/lib/python3*/site-packages"

FACTS = """\
import importlib.metadata, json, os, pathlib, pwd, shutil
import beside, entrypoint
package = pathlib.Path(entrypoint.__file__).parent
code = [path.read_bytes()[4:8] for path in package.rglob("*.pyc")]
found = importlib.metadata.entry_points(group="vllm.general_plugins", name="shardboot")
volume = os.stat("/var/lib/shardboot")
print(json.dumps({
    "package": str(package),
    "command": shutil.which("shardboot"),
    "plugins": [(point.dist.version, point.value) for point in found],
    "user": pwd.getpwuid(2000)[0:6],
    "volume": [volume.st_uid, volume.st_gid, oct(volume.st_mode & 0o7777)],
    "sources": len(list(package.rglob("*.py"))),
    "code": len(code),
    "unchecked": code.count(b"\\x01\\0\\0\\0"),
    "beside": list(pathlib.Path(beside.__cached__).read_bytes()[4:8]),
    "left": [name for name in ("/src", "/wheels", "/root/.cache") if os.path.exists(name)],
}))
"""


@pytest.fixture(scope="module")
def facts(image: str) -> dict[str, Any]:
    done = once(image, "python3", "-c", FACTS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def config(image: str) -> dict[str, Any]:
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    config: dict[str, Any] = found["Config"] | {"Healthcheck": found["Healthcheck"]}
    return config


@pytest.fixture(scope="module")
def node(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"), image)
    yield made
    made.close()
    shutil.rmtree(made.root)


def test_the_image_has_a_shardboot_of_its_own_among_vllms_plugins(facts: dict[str, Any]) -> None:
    assert facts["package"].startswith(f"{VLLM_HOME}/lib/")
    assert facts["command"] == f"{VLLM_HOME}/bin/shardboot"
    assert facts["plugins"] == [[__version__, "entrypoint.vllm_plugin:register"]]


def test_its_bytecode_is_there_whatever_the_time_of_its_source(facts: dict[str, Any]) -> None:
    assert facts["sources"] == facts["code"] == facts["unchecked"] > 50


def test_what_others_left_without_bytecode_has_it_and_it_goes_by_the_source(
    image: str, facts: dict[str, Any]
) -> None:
    # Checked, by the source's hash: as of PEP 552.
    assert facts["beside"] == [3, 0, 0, 0]
    # As an image on top of ours may.
    changed = (
        f"echo 'told = 2' >$(echo {SITE}/beside.py); python3 -c 'import beside; print(beside.told)'"
    )
    done = once(image, "sh", "-euc", changed)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_bytecode_that_cannot_be_written_ends_the_build(image: str, tmp_path: Path) -> None:
    shut = f"cd {SITE} && mkdir shut && touch shut/module.py shut/__pycache__"
    (tmp_path / "Dockerfile").write_text(f"FROM {base_of(image)}\nRUN {shut}\n")
    base, tag = f"{image}-shut", f"{image}-never"
    done = podman("build", "--network", "none", *limits(), "--tag", base, str(tmp_path))
    assert done.returncode == 0, done.stderr
    try:
        done = try_to_build(tag, base)
        assert "/shut/module.py" in done.stdout
        assert done.returncode != 0, last_line(done.stderr)
    finally:
        podman("rmi", "--force", tag, base)


def test_nothing_of_the_build_is_left(facts: dict[str, Any]) -> None:
    assert facts["left"] == []


def test_another_checkout_at_another_time_makes_the_same_image(image: str, tmp_path: Path) -> None:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    copied = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "entrypoint", tmp_path / "entrypoint", ignore=copied)
    for path in tmp_path.rglob("*"):
        path.chmod(0o775 if path.is_dir() else 0o660)
        os.utime(path, (10**9, 10**9))
    one, other = f"{image}-one", f"{image}-other"
    try:
        # Docker's format holds the names of the containers that built it.
        build(one, base_of(image), kind="oci")
        build(other, base_of(image), tmp_path, kind="oci")
        found = json.loads(podman("image", "inspect", one, other, image).stdout)
        assert found[0]["Id"] == found[1]["Id"]
        assert found[0]["RootFS"]["Layers"] == found[2]["RootFS"]["Layers"]
    finally:
        podman("rmi", "--force", one, other)


def test_the_service_user_has_a_home_and_the_volume(facts: dict[str, Any]) -> None:
    assert facts["user"] == ["vllm", "x", SERVICE, SERVICE, "", "/home/vllm"]
    assert facts["volume"] == [SERVICE, 0, "0o775"]


def test_the_image_says_what_it_is_and_how_it_starts(config: dict[str, Any]) -> None:
    assert config["Entrypoint"] == ["shardboot", "enter"]
    assert not config.get("Cmd")
    assert config.get("User", "") == ""
    assert config["Volumes"] == {DATA: {}}
    assert "SHARDBOOT_USER=2000:2000" in config["Env"]
    assert config["Healthcheck"]["Test"] == ["CMD", "shardboot", "health"]
    assert config["Healthcheck"]["StartPeriod"] == 3 * 3600 * 10**9
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["version"] == __version__
    assert labels["licenses"] == "Apache-2.0"


def test_a_program_is_run_with_its_words(node: Node) -> None:
    assert node.once("bash", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]], ids=" ".join)
def test_help_is_that_of_serve_and_tells_where_vllms_is(node: Node, words: list[str]) -> None:
    done = node.once(*words)
    assert done.returncode == 0
    assert "--local-dir" in done.stdout
    assert "`vllm serve --help=all`" in done.stdout


def test_and_there_it_is(node: Node) -> None:
    done = node.once("vllm", "serve", "--help=all")
    assert done.returncode == 0, done.stderr
    assert node.served["argv"][1:] == ["serve", "--help=all"]


def test_who_does_not_start_as_root_stays_who_it_is(node: Node) -> None:
    as_service = node.once("status", options=("--user", f"{SERVICE}:{SERVICE}"))
    assert (as_service.returncode, as_service.stderr) == (0, "")
    as_another = node.once("status", options=("--user", "1234:0"))
    assert (as_another.returncode, as_another.stdout) == (0, NO_BOOT)
    # A look that every probe takes has nothing to say of it.
    assert as_another.stderr == ""


@pytest.mark.parametrize("words", [[], ["--model"], ["serve"], ["vllm", "serve"]], ids=" ".join)
def test_other_words_are_those_of_vllm_serve(node: Node, words: list[str]) -> None:
    done = node.once(*words, node.model, "-tp", 2)
    assert done.returncode == 0, done.stderr
    assert node.served["argv"][2].startswith(f"{DATA}/checkpoints/")
    assert "-tp" in node.served["argv"]
    assert (node.served["pid"], node.served["uids"]) == (1, [SERVICE] * 3)
    assert node.served["gids"] == [SERVICE] * 3
    assert node.served["environ"]["HOME"] == "/home/vllm"


def test_a_command_of_ours_is_run(node: Node) -> None:
    assert node.once(node.model, "-tp", 2).returncode == 0
    done = node.once("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(node.store.names()[0])


def test_a_fresh_volume_has_no_checkpoints_yet(image: str) -> None:
    done = once(image, "list")
    said = f"{DATA}/checkpoints: not there yet, so no checkpoints\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
