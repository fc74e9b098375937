"""Images, adapters, drafts, replicas: a checkpoint serves them as vLLM serves them alone.

Each case boots `shardboot serve`, which saves and serves its checkpoint, and plain `vllm serve`.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from models import fine_tune, make_model
from processes import run
from serving import FLAGS, Server, decision, environment

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.manifest import MANIFEST, Manifest

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROMPTS = ("The first word", "0123456789")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Case:
    """One model served in one way, with stores of its own."""

    def __init__(self, room: Path, model: Path, *words: str, world: int = 1, **more: str) -> None:
        room.mkdir()
        self.room, self.model, self.words = room, model, words
        self.environ = environment(world) | {
            "SHARDBOOT_LOCAL_DIR": str(room / "checkpoints"),
            "SHARDBOOT_STATE_DIR": str(room / "state"),
            "SHARDBOOT_LOG_FORMAT": "json",
            **{f"SHARDBOOT_{key.upper()}": value for key, value in more.items()},
        }

    def served(self, ask: Callable[[Server], Any]) -> tuple[Any, Any]:
        """Return what a server on the checkpoint answers, and what one on the source does."""
        log = self.room / "serve.log"
        found = self._boot("shardboot", log, ask)
        assert decision(log) == ("saved", "local.absent")
        assert "Loading the source instead" not in log.read_text(errors="replace")
        return found, self._boot("vllm", self.room / "plain.log", ask)

    def _boot(self, program: str, log: Path, ask: Callable[[Server], Any]) -> Any:
        command = [binary(program), "serve", str(self.model), *FLAGS, *self.words]
        with Server(command, self.environ, log) as server:
            server.wait_until_healthy()
            return ask(server)

    def plan(self, *words: str) -> dict[str, Any]:
        """Return what a boot with other words would do with the same stores."""
        line = [binary("shardboot"), "plan", "--format", "json", str(self.model), *FLAGS, *words]
        status, said = run(line, self.environ, self.room / "plan.log")
        assert status == 0
        answer: dict[str, Any] = json.loads(said)
        return answer

    def manifest(self) -> Manifest:
        (path,) = (self.room / "checkpoints").glob(f"*/{MANIFEST}")
        return manifests.decode(path.read_bytes())


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("kinds")
    make_model("dense", directory / "dense")
    yield directory
    shutil.rmtree(directory)


def picture(red: int, size: int = 64) -> str:
    """Return a PNG of two gradients as a data: URL."""
    rows = b"".join(
        b"\0" + bytes(value for x in range(size) for value in (red, 4 * x, 4 * y))
        for y in range(size)
    )
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@pytest.mark.parametrize("tp", [1, 2])
def test_images_are_answered_alike(tp: int, room: Path) -> None:
    model = room / "vision"
    if not model.exists():
        make_model("vision", model)
    case = Case(room / f"image-{tp}", model, "-tp", str(tp), world=tp, prove="always")

    def ask(server: Server) -> Any:
        text = {"type": "text", "text": PROMPTS[0]}
        seen = [{"type": "image_url", "image_url": {"url": picture(red)}} for red in (0, 250)]
        return [
            server.chat(str(model), parts) for parts in (PROMPTS[0], *([s, text] for s in seen))
        ]

    found, plain = case.served(ask)
    assert found == plain
    assert case.manifest().proof
    # Or the tower's weights would not count.
    assert len({answer.tokens for answer in plain}) == len(plain)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_answer_alike_and_change_no_key(tp: int, room: Path) -> None:
    model, adapter = room / "dense", room / "adapter"
    if not adapter.exists():
        make_adapter(model, adapter)
    words = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}")
    case = Case(room / f"adapter-{tp}", model, "-tp", str(tp), *words, world=tp)
    names = (str(model), "tuned")
    found, plain = case.served(lambda server: [server.complete(name, PROMPTS[0]) for name in names])
    assert found == plain
    assert plain[0] != plain[1]
    bare = case.plan("-tp", str(tp))
    assert (bare["action"], bare["reason"]) == ("reuse", "local.hit")


@pytest.mark.parametrize(("tp", "method"), [(1, "draft_model"), (2, "draft_model"), (1, "ngram")])
def test_drafts_are_as_good_and_answers_alike(tp: int, method: str, room: Path) -> None:
    # The draft's shapes are the model's own: taking one's weights for the other's would be silent.
    model, draft = room / "dense", room / "draft"
    if not draft.exists():
        fine_tune(model, draft)
    about: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        about |= {"prompt_lookup_max": 3}
    else:
        about |= {"model": str(draft), "draft_tensor_parallel_size": tp}
    words = ("-tp", str(tp), "--speculative-config", json.dumps(about))
    case = Case(room / f"{method}-{tp}", model, *words, world=tp)

    def ask(server: Server) -> Any:
        answers = [server.complete(str(model), prompt) for prompt in PROMPTS]
        return answers, server.counted(ACCEPTED)

    found, plain = case.served(ask)
    assert found == plain
    if method == "draft_model":
        assert plain[1] > 0


def test_replicas_of_a_dense_model_load_one_checkpoint(room: Path) -> None:
    model = room / "dense"
    case = Case(room / "replicas", model, "-dp", "2", world=2)
    found, plain = case.served(
        lambda server: [server.complete(str(model), PROMPTS[0], replica) for replica in (0, 1)]
    )
    assert found == plain
    assert case.plan()["reason"] == "local.hit"
    make_model("moe", room / "moe")
    experts = Case(room / "experts", room / "moe", world=2)
    refused = experts.plan("-dp", "2", "--enable-expert-parallel")
    assert (refused["action"], refused["reason"]) == ("serve-source", "layout.dp-moe")
