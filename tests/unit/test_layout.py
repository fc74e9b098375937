from __future__ import annotations

import re

import pytest
from checkpoints import make_key
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint.entry import check_path
from entrypoint.checkpoint.layout import (
    Layout,
    checkpoint_name,
    generation_of,
    layout_of,
    with_generation,
)

layouts = st.builds(Layout, tp=st.integers(1, 16), pp=st.integers(1, 4))


@given(layouts, st.data(), st.integers(0, 999))
def test_a_rank_and_a_part_come_back_from_their_file_name(
    layout: Layout, data: st.DataObject, part: int
) -> None:
    rank = data.draw(st.sampled_from(layout.ranks))
    assert layout.rank_of(layout.shard_name(rank, part)) == (rank, part)


@given(layouts)
def test_no_two_ranks_share_a_name(layout: Layout) -> None:
    names = [layout.shard_name(rank, 0) for rank in layout.ranks]
    assert len(set(names)) == layout.world == layout.tp * layout.pp


def test_names_are_those_of_vllms_own_loader() -> None:
    assert Layout(tp=2, pp=1).shard_name(1, 0) == "model-rank-1-part-0.safetensors"
    assert Layout(tp=2, pp=2).shard_name(3, 1) == "model-pp-1-tp-1-part-1.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "model-rank-01-part-0.safetensors",
        "model-rank-1-part-00.safetensors",
        "model-rank--1-part-0.safetensors",
        "model-rank-٣-part-0.safetensors",
        "model-rank-1-part-0.safetensors.tmp",
        "x/model-rank-1-part-0.safetensors",
        "model-rank-1-part-0.safetensors\n",
        "model-pp-0-tp-1-part-0.safetensors",
        "model-00001-of-00002.safetensors",
        "config.json",
        "",
    ],
)
def test_other_names_belong_to_no_rank(name: str) -> None:
    assert Layout(tp=2, pp=1).rank_of(name) is None


def test_a_name_of_one_layout_is_none_of_the_other() -> None:
    assert Layout(tp=2, pp=2).rank_of("model-rank-1-part-0.safetensors") is None
    assert Layout(tp=2, pp=2).rank_of("model-pp-0-tp-2-part-0.safetensors") is None


def test_replicas_share_one_layout() -> None:
    assert layout_of(make_key(tp=4, pp=2, dp=8)) == Layout(tp=4, pp=2)


@pytest.mark.parametrize(
    ("model", "changes", "begins"),
    [
        ("meta/Llama-3", {}, "Llama-3-tp2-bf16-vllm0.32.0-"),
        ("/models/llama/", {"dtype": "float16"}, "llama-tp2-fp16-vllm0.32.0-"),
        ("m", {"tp": 8, "pp": 2, "ep": True}, "m-tp8-pp2-ep-bf16-vllm0.32.0-"),
        ("m", {"quantization": "awq"}, "m-tp2-bf16-awq-vllm0.32.0-"),
        ("m", {"vllm": "0.32.0+cpu"}, "m-tp2-bf16-vllm0.32.0_cpu-"),
        ("a b/../..", {}, "model-tp2-"),
        ("", {}, "model-tp2-"),
        (".hidden", {}, "hidden-tp2-"),
        ("Modèle ü", {}, "Mod_le_-tp2-"),
    ],
)
def test_a_name_says_what_it_is(model: str, changes: dict[str, object], begins: str) -> None:
    key = make_key(**changes)
    name = checkpoint_name(model, key)
    assert name.startswith(begins)
    assert name.endswith(key.digest[:12])


@given(st.text(max_size=300), st.text(max_size=20), st.text(max_size=20))
def test_names_are_safe_whatever_the_model_is_called(model: str, dtype: str, method: str) -> None:
    key = make_key(dtype=dtype, quantization=method or None)
    try:
        name = checkpoint_name(model, key)
    except UnicodeEncodeError:
        return  # such words never come out of JSON that vLLM printed
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name)
    check_path(name, "name")
    assert generation_of(name)[1] == 1 or "-g" in name


@given(st.from_regex(r"[a-z0-9.-]{1,20}-[0-9a-f]{12}", fullmatch=True), st.integers(1, 1000))
def test_a_generation_comes_back_from_its_name(base: str, generation: int) -> None:
    assert generation_of(with_generation(base, generation)) == (base, generation)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x", ("x", 1)),
        ("x-g2", ("x", 2)),
        ("x-g12", ("x", 12)),
        ("x-g1", ("x-g1", 1)),
        ("x-g0", ("x-g0", 1)),
        ("x-g02", ("x-g02", 1)),
        ("x-g1٣", ("x-g1٣", 1)),
        ("x-g2-g3", ("x-g2", 3)),
        ("-g2", ("-g2", 1)),
        ("", ("", 1)),
    ],
)
def test_only_a_suffix_that_we_write_is_a_generation(name: str, expected: tuple[str, int]) -> None:
    assert generation_of(name) == expected
