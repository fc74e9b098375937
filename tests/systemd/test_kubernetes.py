"""The Kubernetes manifests against the API's own schemas, since there is no cluster here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from container.image import ROOT

from entrypoint.image import ROOMS
from entrypoint.surface import OPTIONS

MANIFESTS = ROOT / "scripts" / "kubernetes"
API = "1.37"
FILES = [
    *sorted(MANIFESTS.iterdir()),
    *sorted((ROOT / "scripts" / "systemd").iterdir()),
    ROOT / "scripts" / "compose.yaml",
]


def load(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((MANIFESTS / name).read_text())


def validate(manifest: Any) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="scripts/setup installs it")
    schemas.validate(manifest, API, strict=True)


def pods() -> list[tuple[str, Any]]:
    deployment, pair = load("deployment.yaml"), load("leaderworkerset.yaml")
    return [
        ("deployment", deployment["spec"]["template"]),
        ("leaderworkerset", pair["spec"]["leaderWorkerTemplate"]["workerTemplate"]),
    ]


def test_the_deployment_is_one() -> None:
    validate(load("deployment.yaml"))


def test_the_pods_of_a_group_are_pods() -> None:
    template = dict(pods())["leaderworkerset"]
    validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template})


def test_a_group_is_one_of_leaderworkersets() -> None:
    path = os.environ.get("LWS_CRD")
    if not path:
        pytest.skip("LWS_CRD names no file, and no package brings LeaderWorkerSet's schema")
    crd = pytest.importorskip("yaml").safe_load(Path(path).read_text())
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    pytest.importorskip("jsonschema").validate(load("leaderworkerset.yaml"), schema)


def closed(schema: Any) -> Any:
    """Return a schema that allows no field it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    found = {name: closed(value) for name, value in schema.items()} | more
    if "x-kubernetes-int-or-string" in found:
        found.pop("type", None)
    # Only Kubernetes looks into metadata.
    if found.get("type") == "object" and len(found) == 1:
        return {}
    return found


@pytest.mark.parametrize("which", ["deployment", "leaderworkerset"])
def test_init_and_server_see_the_same_machine(which: str) -> None:
    spec = dict(pods())[which]["spec"]
    (pull,), (vllm, *_) = spec["initContainers"], spec["containers"]
    for name in ("image", "args", "env", "resources", "securityContext", "volumeMounts"):
        assert pull[name] == vllm[name], name
    mounted = {mount["name"] for mount in vllm["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_sidecar_shares_the_servers_stores_and_none_of_its_gpus() -> None:
    vllm, sidecar = dict(pods())["deployment"]["spec"]["containers"]
    assert (vllm["name"], sidecar["name"]) == ("vllm", "sidecar")
    mounts = [mount for mount in vllm["volumeMounts"] if mount["name"] in ("data", "checkpoints")]
    assert sidecar["volumeMounts"] == mounts
    assert "nvidia.com/gpu" not in sidecar["resources"]["limits"]
    listen = {each["name"]: each["value"] for each in sidecar["env"]}["SHARDBOOT_LISTEN"]
    (port,) = sidecar["ports"]
    assert listen == f"0.0.0.0:{port['containerPort']}"


@pytest.mark.parametrize("which", ["deployment", "leaderworkerset"])
@pytest.mark.parametrize("container", ["pull", "vllm"])
def test_words_reach_shardboot_as_they_are(which: str, container: str, tmp_path: Path) -> None:
    words = ["/models/llama 3", "--speculative-config", '{"method": "ngram", "a": "$b *"}']
    assert called(dict(pods())[which]["spec"], container, words, tmp_path)[1:] == words


def test_only_the_leader_of_a_group_answers_http(tmp_path: Path) -> None:
    spec = dict(pods())["leaderworkerset"]["spec"]
    assert called(spec, "vllm", ["m"], tmp_path, index=0) == ["serve", "m"]
    assert called(spec, "vllm", ["m"], tmp_path, index=1) == ["serve", "m", "--headless"]


def called(spec: Any, container: str, words: list[str], room: Path, index: int = 0) -> list[str]:
    """Return what shardboot gets where these are the words of a container."""
    (found,) = (c for c in spec["initContainers"] + spec["containers"] if c["name"] == container)
    program = room / "shardboot"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    environ = {"PATH": f"{room}:/usr/bin:/bin", "LWS_WORKER_INDEX": str(index)}
    command = [*found["command"], *words]
    done = subprocess.run(command, check=True, env=environ, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_and_commands_are_ours(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"SHARDBOOT_\w+", text)) <= {option.variable for option in OPTIONS}
    commands = {"serve", *(name for names in ROOMS.values() for name in names)}
    found = set(re.findall(r"(?:(?:=|exec |\[|')shardboot,?|bin/shardboot) (\w+)", text))
    assert found <= commands
    # The others start nothing, or leave it to the image.
    silent = ("compose.yaml", "standby.conf", "sysusers.conf", "tmpfiles.conf")
    assert found or path.name in silent
