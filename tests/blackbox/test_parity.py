"""scripts/gpu-parity on a machine that only claims to have GPUs: a Python that acts as vLLM's.

What vLLM itself would do there is not known, and not tested here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-parity"

# Probed, it names GPUs; asked for models, it makes none; asked to save, each kind goes its own way.
ACTOR = """#!{python}
import json, os, pathlib, sys, time
words = sys.argv[1:]
if "-c" in words:
    is_probe = "get_device_name" in words[words.index("-c") + 1]
    at = os.environ.get("ACTOR_AT") == ("probe" if is_probe else "models")
    if at and os.environ["ACTOR_DOES"] == "hangs":
        time.sleep(600)
    if at:
        sys.exit("Traceback\\nMemoryError")
    if is_probe:
        print(os.environ["ACTOR_ABOUT"])
    sys.exit(0)
given = dict(zip(words, words[1:]))
model = next(pathlib.Path(word) for word in words if "/models/" in word)
with open(os.environ["ACTOR_CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
match model.name:
    case "awq":
        print("vLLM's own\\nshardboot: error: save.unproven: tokens differ", file=sys.stderr)
        sys.exit(51)
    case "gptq":
        print("shardboot: error: engine.rejected: not on this GPU", file=sys.stderr)
        sys.exit(50)
    case "bias":
        time.sleep(600)
checkpoint = pathlib.Path(given["--local-dir"], "name")
checkpoint.mkdir(parents=True)
proof = {{"items": 12, "unprobed": []}}
(checkpoint / "manifest.json").write_text(json.dumps({{"proof": proof}}))
"""


class Stage:
    """A machine with an actor for vLLM's Python."""

    def __init__(self, room: Path) -> None:
        self.room = room
        python, self.vllm, self.calls = room / "python-actor", room / "vllm", room / "calls"
        python.write_text(ACTOR.format(python=sys.executable))
        self.vllm.write_text(f"#!{python}\n")
        for program in (python, self.vllm):
            program.chmod(0o755)

    def run(
        self, *words: str, gpus: int = 1, shardboot: str | None = "0.1.0", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        about = {"vllm": "0.32.0", "shardboot": shardboot, "gpus": ["Fake"] * gpus}
        environ = (
            os.environ
            | environment
            | {
                "ACTOR_ABOUT": json.dumps(about),
                "ACTOR_CALLS": str(self.calls),
                "TMPDIR": str(self.room),
            }
        )
        done = subprocess.run(
            [SCRIPT, "--vllm", str(self.vllm), *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not list(self.room.glob("shardboot-parity.*"))
        assert not [entry for entry in Path("/proc").glob("[0-9]*") if self.runs(entry)]
        return done

    def runs(self, process: Path) -> bool:
        try:
            return os.fsencode(self.room) in (process / "cmdline").read_bytes()
        except OSError:
            return False

    def called(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "shardboot", "lacking"), [(0, "0.1.0", "no GPU"), (1, None, "no shardboot")]
)
def test_without_a_gpu_or_shardboot_nothing_is_run_and_that_is_said(
    gpus: int, shardboot: str | None, lacking: str, stage: Stage
) -> None:
    done = stage.run(gpus=gpus, shardboot=shardboot)
    assert done.returncode == 77
    assert lacking in done.stderr
    assert done.stderr.endswith("nothing was run, nothing is known\n")
    assert not done.stdout


@pytest.mark.parametrize("at", ["probe", "models"])
@pytest.mark.parametrize(
    ("does", "seconds", "says"),
    [("hangs", 3, "no time left for"), ("fails", 600, "MemoryError; nothing was run")],
)
def test_what_fails_or_hangs_before_anything_is_run_says_so_in_time(
    at: str, does: str, seconds: int, says: str, stage: Stage
) -> None:
    done = stage.run("--seconds", str(seconds), ACTOR_AT=at, ACTOR_DOES=does)
    assert done.returncode == 77
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_what_ran_and_what_did_not_stand_in_one_table(stage: Stage) -> None:
    done = stage.run("--kinds", "dense,awq,gptq,moe-ep")
    assert done.returncode == 1
    assert done.stdout.splitlines()[2:] == [
        "| kind | TP=1 | TP=2 |",
        "| --- | --- | --- |",
        "| dense | proved: 12 items | not run: 1 GPU for 2 ranks |",
        "| awq | failed: save.unproven: tokens differ | not run: 1 GPU for 2 ranks |",
        "| gptq | not run: engine.rejected: not on this GPU | not run: 1 GPU for 2 ranks |",
        "| moe-ep | proved: 12 items | not run: 1 GPU for 2 ranks |",
        "",
        "1 of 3 failed; 5 not run, of which nothing is known",
    ]


def test_two_gpus_run_both_sizes_each_in_a_store_of_its_own(stage: Stage) -> None:
    done = stage.run("--kinds", "dense,fp8-block", gpus=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all 4 that ran are proved\n")
    called = stage.called()
    assert sorted(words[-2:] for words in called) == [["-tp", "1"]] * 2 + [["-tp", "2"]] * 2
    assert len({words[words.index("--local-dir") + 1] for words in called}) == 4
    assert all("--kv-cache-memory-bytes" in words for words in called)


def test_a_kind_that_takes_too_long_has_failed(stage: Stage) -> None:
    done = stage.run("--kinds", "bias,dense", "--each", "5", "--at-once", "2")
    assert done.returncode == 1
    assert "| bias | failed: not done in 5 s |" in done.stdout
    assert "| dense | proved" in done.stdout


def test_when_the_time_is_over_the_rest_is_not_run(stage: Stage) -> None:
    started = time.monotonic()
    done = stage.run("--kinds", "bias,dense", "--seconds", "10", "--at-once", "1")
    assert time.monotonic() - started < 60
    assert done.returncode == 77
    assert "| bias | not run: no time left: stopped after" in done.stdout
    assert "| dense | not run: no time left: not begun |" in done.stdout
