"""When vLLM is asked anew how it reads the words, though an answer is remembered."""

from __future__ import annotations

from blackbox.harness import House


def asked(house: House) -> bool:
    """Boot, and tell whether vLLM was asked."""
    return "engine.asked" in house.serve().events


def test_what_could_not_be_found_out_is_asked_anew(house: House) -> None:
    told = {"verified": False, "why": "disk full", "failed": True}
    house.rules(resolve={"change": {"words": told}})
    assert house.serve().events[-1] == "engine.words"
    house.rules()
    assert house.serve().events[-1] == "local.hit"
    assert not asked(house)


def test_a_difference_is_remembered(house: House) -> None:
    told = {"verified": False, "why": "it is another tokenizer", "failed": False}
    house.rules(resolve={"change": {"words": told}})
    assert asked(house)
    assert not asked(house)


def test_what_only_the_weights_tell_is_asked_anew_for_other_weights(house: House) -> None:
    house.rules(resolve={"change": {"words": {"pinned": ["--dtype", "float16"]}}})
    assert house.serve().events[-1] == "local.hit"
    # Now it is known which weights these are.
    assert asked(house)
    assert not asked(house)
    weights = house.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert asked(house)
