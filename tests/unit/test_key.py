from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from checkpoints import make_key
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.key import Key, differences
from entrypoint.errors import ManifestError

NAMES = Key._fields

OTHER: Mapping[str, object] = {
    **dict.fromkeys(NAMES, "other"),
    **dict.fromkeys(("tp", "pp", "dp", "cp", "redundant_experts", "format"), 7),
    **dict.fromkeys(("ep", "eplb"), True),
    "backends": {"VLLM_MLA_DISABLE": "1"},
}


def changed(name: str) -> Key:
    return make_key(**{name: OTHER[name]})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def values(name: str) -> st.SearchStrategy[Any]:
    match OTHER[name]:
        case bool():
            return st.booleans()
        case int():
            return st.integers(0, 1_000_000)
        case dict():
            return st.dictionaries(texts, texts, max_size=3)
        case _:
            return texts


keys = st.fixed_dictionaries({name: values(name) for name in NAMES}).map(lambda v: Key(**v))


@pytest.mark.parametrize("name", NAMES)
def test_flipping_any_single_field_gives_another_digest(name: str) -> None:
    assert changed(name).digest != make_key().digest


@given(keys, keys)
def test_only_equal_keys_share_a_digest(left: Key, right: Key) -> None:
    assert (left.digest == right.digest) == (left == right)


@given(keys)
def test_a_key_comes_back_from_json_as_it_was(key: Key) -> None:
    again = Key.from_json(json.loads(canonical(key.to_json())))
    assert again == key
    assert again.digest == key.digest


def test_the_order_of_backends_does_not_matter() -> None:
    left = make_key(backends={"a": "1", "b": "2"})
    right = make_key(backends={"b": "2", "a": "1"})
    assert left.digest == right.digest


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    document = make_key().to_json()
    del document[name]
    with pytest.raises(ManifestError, match=rf"key\.{name}: missing"):
        Key.from_json(document)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match=r"key\.sp: unknown"):
        Key.from_json(make_key().to_json() | {"sp": 2})


ODD: list[Json] = [None, 1.5, -1, 10**9, True, "x" * 5000, [], {}, [1], {"a": 1}]


@pytest.mark.parametrize("name", NAMES)
def test_an_ill_typed_field_is_refused_by_name(name: str) -> None:
    good: list[tuple[str, Json]] = [("quantization", None), ("backends", {})]
    good += [("ep", True), ("eplb", True)]
    for odd in ODD:
        if any(name == n and type(odd) is type(g) and odd == g for n, g in good):
            continue
        with pytest.raises(ManifestError, match=rf"key\.{name}: unexpected"):
            Key.from_json(make_key().to_json() | {name: odd})


@pytest.mark.parametrize("value", [None, [], "key", 3, True])
def test_what_is_no_object_is_no_key(value: Json) -> None:
    with pytest.raises(ManifestError, match="expected an object"):
        Key.from_json(value)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "model"])
def test_a_difference_names_its_field_and_both_sides(name: str) -> None:
    [difference] = differences(make_key(), changed(name))
    wanted = make_key().to_json()[name]
    assert difference.to_json() == {"field": name, "wanted": wanted, "found": OTHER[name]}


def test_the_model_is_compared_elsewhere() -> None:
    assert differences(make_key(), changed("model")) == ()
