"""What real vLLM answers on a checkpoint is what it answers on the source.

`lab` is conftest's `Lab`; conftest cannot be imported, so it goes by Any.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.vllm

KINDS = ("dense", "tied", "moe", "int8", "awq")


def farthest(left: Any, right: Any) -> float:
    return max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_gives_the_state_and_the_answers_of_its_source(
    kind: str, tp: int, lab: Any
) -> None:
    checkpoint, _, arguments = lab.checkpoint(kind, tp=tp)
    plain = lab.engine(lab.model(kind), f"{kind}-{tp}-source", tp=tp)
    assert plain.done, plain.stderr[-4000:]
    again = lab.engine(checkpoint, f"{kind}-{tp}-again", tp=tp, **arguments)
    assert again.done, again.stderr[-4000:]

    assert sorted(again.state) == list(range(tp))
    assert again.state == plain.state
    assert again.tokens == plain.tokens
    # A model that says one token over and over would hide a wrong weight.
    assert all(len(set(tokens)) > 3 for tokens in plain.tokens)
    distance = farthest(again, plain)
    print(f"\n{kind} tp{tp}: logprobs differ by at most {distance}")
    if distance > 0:
        control = lab.engine(lab.model(kind), f"{kind}-{tp}-control", tp=tp)
        assert distance <= farthest(control, plain)
