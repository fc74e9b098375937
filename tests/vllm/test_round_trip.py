"""What real vLLM answers on a checkpoint is what it answers on the source.

`lab` is conftest's `Lab`; conftest cannot be imported, so it goes by Any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

KINDS = ("dense", "tied", "moe", "int8", "awq")


def farthest(left: Any, right: Any) -> float:
    distances = [abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True)]
    return float(max(distances))


def is_like(found: Any, sources: list[Any]) -> bool:
    """Tell whether the answers are a source's, as exactly as the sources' own are each other's."""
    distance = min(farthest(found, source) for source in sources)
    said_so = found.tokens in [source.tokens for source in sources]
    return said_so and distance <= farthest(sources[0], sources[-1])


def pairs() -> Iterator[Any]:
    """Yield every kind at both sizes: at one each time, at the other where there is time."""
    for kind in KINDS:
        for tp in (1, 2):
            is_rare = tp != (2 if kind == "tied" else 1)
            yield pytest.param(kind, tp, marks=[pytest.mark.long] if is_rare else [])
    yield pytest.param("untied", 1, marks=pytest.mark.long)


@pytest.mark.parametrize(("kind", "tp"), [*pairs()])
def test_checkpoint_gives_the_state_and_the_answers_of_its_source(
    kind: str, tp: int, lab: Any
) -> None:
    checkpoint, _, arguments = lab.checkpoint(kind, tp=tp)
    plain = lab.engine(lab.model(kind), f"{kind}-{tp}-source", tp=tp)
    assert plain.done, plain.said[-4000:]
    again = lab.engine(checkpoint, f"{kind}-{tp}-again", tp=tp, **arguments)
    assert again.done, again.said[-4000:]

    assert sorted(again.state) == list(range(tp))
    assert again.state == plain.state
    # A model that says one token over and over would hide a wrong weight.
    assert all(len(set(tokens)) > 3 for tokens in plain.tokens)
    sources = [plain]
    if farthest(again, plain) > 0:
        sources.append(lab.engine(lab.model(kind), f"{kind}-{tp}-control", tp=tp))
    if not is_like(again, sources):
        # A table that is computed anew differs now and then between processes of one model.
        again = lab.engine(checkpoint, f"{kind}-{tp}-once-more", tp=tp, **arguments)
        assert again.state == plain.state
    print(f"\n{kind} tp{tp}: logprobs differ by at most {farthest(again, plain)}")
    assert is_like(again, sources), (again.tokens, [source.tokens for source in sources])


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_pipeline_stages_keep_their_names_and_their_state(tp: int, lab: Any) -> None:
    # The CPU cannot generate with pipeline stages, from any load format.
    checkpoint, manifest, arguments = lab.checkpoint("dense", tp=tp, pp=2)
    names = {entry.path for entry in manifest.files if entry.role == "weights"}
    stages = {f"model-pp-{p}-tp-{t}-part-0.safetensors" for p in range(2) for t in range(tp)}
    assert stages <= names
    layout = {"tp": tp, "pp": 2, "speak": False}
    plain = lab.engine(lab.model("dense"), f"pp2-tp{tp}-source", **layout)
    again = lab.engine(checkpoint, f"pp2-tp{tp}-again", **layout, **arguments)
    assert again.done, again.said[-4000:]
    assert sorted(again.state) == list(range(2 * tp))
    assert again.state == plain.state


def test_all_ranks_refuse_what_one_rank_finds_damaged(lab: Any) -> None:
    checkpoint, manifest, arguments = lab.checkpoint("bias", tp=2)
    last = max(e.path for e in manifest.files if e.rank == 1)
    with (checkpoint / last).open("r+b") as file:
        file.truncate((checkpoint / last).stat().st_size - 1)
    found = lab.engine(checkpoint, "damaged", tp=2, **arguments)
    assert not found.done
    assert not found.state
    for worker in ("(Worker_TP0", "(Worker_TP1"):
        said = [line for line in found.said.splitlines() if line.startswith(worker)]
        assert any("DamagedError: worker 1 objects: " in s for s in said)
        assert any(last in line for line in said)


def test_online_quantization_is_refused_by_name(lab: Any) -> None:
    answer = lab.save(lab.model("dense"), lab.room / "online", words=("--quantization", "fp8"))
    assert answer["status"] == "refused"
    assert answer["reason"] == "save.online-quant"
    assert not list((lab.room / "online").glob("*.safetensors"))


def test_nothing_is_saved_where_the_key_is_not_what_boot_goes_by(lab: Any) -> None:
    told = lab.save(lab.model("dense"), lab.room / "by no key")["key"]
    for name, stale in (("held", {}), ("stale", {"dtype": "float16"})):
        answer = lab.save(lab.model("dense"), lab.room / name, key=told | stale)
        assert (answer["status"], answer["key"]["dtype"]) == ("ok", "bfloat16")
        assert bool([*(lab.room / name).glob("*.safetensors")]) == (name == "held")
