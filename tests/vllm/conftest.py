"""Real vLLM in children that never outlive their test, and checkpoints assembled by hand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models import make_model
from serving import cores

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint.digest import digest_file
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.checkpoint.manifest import MANIFEST, Manifest, Source

ENGINE = Path(__file__).with_name("engine_child.py")
SECONDS = 300
PROMPTS = ["The first word", "0123456789", "abc abc abc abc", "?!"]
WORDS = ["--dtype", "bfloat16", "--max-model-len", "256"]
FILE_MODE = 0o640
CREATED_AT = "2026-01-01T00:00:00Z"
PYTHON_M = [sys.executable, "-P", "-m"]


def environment(world: int) -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "SHARDBOOT"))}
    return found | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores(world),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_child(
    command: list[str],
    request: object,
    world: int = 1,
    pass_fds: tuple[int, ...] = (),
    extra: Mapping[str, str] | None = None,
) -> str:
    """Run a child to its end and return what it said; its process group is gone afterwards."""
    child = subprocess.Popen(
        command,
        pass_fds=pass_fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(world) | dict(extra or {}),
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = child.communicate(json.dumps(request), timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return said


def ask(
    command: list[str],
    request: object,
    world: int = 1,
    extra: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a child that answers on a descriptor and return its answer."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as answer:
        try:
            said = run_child([*command, str(writing)], request, world, (writing,), extra)
        finally:
            os.close(writing)
        text = answer.read()
    assert text, said[-4000:]
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True)
class Told:
    """What one engine said: greedy answers, and digests of the state of every rank."""

    answers: list[dict[str, Any]]
    state: dict[int, dict[str, str]]
    said: str
    done: bool

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["tokens"] for answer in self.answers]

    @property
    def logprobs(self) -> list[float]:
        return [value for answer in self.answers for value in answer["logprobs"]]


class Lab:
    """A directory with tiny models, and what to do with them."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.keys: dict[Path, dict[str, Any]] = {}

    def model(self, kind: str) -> Path:
        """Return a model of tests/models.py; `untied` claims to be tied, and its files differ."""
        directory = self.room / kind
        if directory.exists():
            return directory
        make_model("dense" if kind == "untied" else kind, directory)
        if kind == "untied":
            config = json.loads((directory / "config.json").read_text())
            config["tie_word_embeddings"] = True
            (directory / "config.json").write_text(json.dumps(config))
        return directory

    def run(self, command: list[str], request: object) -> str:
        return run_child(command, request)

    def ask(self, command: list[str], request: object, extra: Mapping[str, str]) -> dict[str, Any]:
        return ask(command, request, extra=extra)

    def engine(
        self,
        model: Path,
        name: str,
        *,
        tp: int = 1,
        pp: int = 1,
        speak: bool = True,
        reload: bool = False,
        **more: Any,
    ) -> Told:
        """Load `model` in real vLLM; `more` are engine arguments. Without `speak`, load only.

        With `reload`, forget the weights and load them again in place.
        """
        result = self.room / name
        arguments = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True} | more
        arguments |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        request = {
            "model": str(model),
            "arguments": arguments,
            "prompts": PROMPTS if speak else [],
            "reload": reload,
        }
        said = run_child([sys.executable, str(ENGINE), str(result)], request, tp * pp)
        state = {
            int(path.suffix.removeprefix(".rank-")): json.loads(path.read_text())
            for path in self.room.glob(f"{name}.rank-*")
        }
        answers = json.loads(result.read_text()) if result.exists() else None
        return Told(answers or [], state, said, done=result.exists())

    def save(
        self,
        model: Path,
        staging: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        words: tuple[str, ...] = (),
        **more: Any,
    ) -> dict[str, Any]:
        """Save `model` to `staging` through the save child; return its answer.

        `more` goes into its request.
        """
        staging.mkdir()
        request = {
            "words": [str(model), *WORDS, "-tp", str(tp), "-pp", str(pp), *words],
            "staging": str(staging),
            "size_per_file": 1_500_000,
            "file_mode": FILE_MODE,
        } | more
        answer = ask([*PYTHON_M, "entrypoint.vllm_plugin.save"], request, tp * pp)
        self.keys[staging] = answer.get("key", {})
        return answer

    def assemble(self, model: Path, staging: Path, *, tp: int = 1, pp: int = 1) -> Manifest:
        """Make a checkpoint of what a save left in `staging`."""
        pattern = fragments.fragment_name(0).replace("0", "*")
        found = [fragments.decode(path.read_bytes()) for path in sorted(staging.glob(pattern))]
        model_files = []
        for path in sorted(model.iterdir()):
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, staging / path.name)
                size, digest = path.stat().st_size, digest_file(path)
                model_files.append(
                    FileEntry(path=path.name, size=size, blake3=digest, role="model")
                )
        key = _key(tp=tp, pp=pp)._replace(**self.keys.get(staging, {}))
        source = Source(name=model.name, revision=None, identity={})
        manifest, index = fragments.assemble(found, model_files, key, source, {}, CREATED_AT)
        (staging / INDEX).write_bytes(index)
        (staging / MANIFEST).write_bytes(manifest.encode())
        return manifest

    def checkpoint(
        self, kind: str, *, tp: int = 1, pp: int = 1
    ) -> tuple[Path, Manifest, dict[str, Any]]:
        """Save a kind of model; return the checkpoint, its manifest and engine arguments."""
        staging = self.room / f"{kind}-tp{tp}-pp{pp}"
        answer = self.save(self.model(kind), staging, tp=tp, pp=pp)
        assert answer["status"] == "ok", answer
        manifest = self.assemble(self.model(kind), staging, tp=tp, pp=pp)
        assert answer["bytes"] == sum(e.size for e in manifest.files if e.role == "weights")
        extra = {"manifest": manifest.digest}
        return staging, manifest, {"load_format": "shardboot", "model_loader_extra_config": extra}


def _key(*, tp: int, pp: int) -> Key:
    # Filling, where nothing is loaded by real vLLM.
    return Key(
        model="0" * 64,
        architecture="",
        runner="generate",
        tp=tp,
        pp=pp,
        dp=1,
        ep=False,
        cp=1,
        eplb=False,
        redundant_experts=0,
        expert_placement="linear",
        dtype="bfloat16",
        quantization=None,
        quantization_config="",
        kv_cache_dtype="auto",
        hf_overrides="",
        model_impl="auto",
        speculative="",
        multimodal="",
        backends={},
        engine="vllm",
        vllm="",
        format=FORMAT,
        platform="",
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("vllm")
    yield Lab(directory)
    shutil.rmtree(directory)


@pytest.fixture
def lab_key() -> Key:
    return _key(tp=1, pp=1)
