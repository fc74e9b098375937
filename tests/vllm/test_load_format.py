"""The loaders themselves, in this process: real vLLM classes, and a model of two layers."""

from __future__ import annotations

import fcntl
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import MANIFEST, Manifest, Source
from entrypoint.errors import KeyMismatchError

pytestmark = [
    pytest.mark.vllm,
    # Importing vLLM warns of whatever this machine lacks.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.config")
    from entrypoint.vllm_plugin import compat

    monkeypatch.setattr(compat, "tp_pp_rank", lambda: (1, 1, 0))
    monkeypatch.setattr(compat, "gather", lambda value: [value])


def model(fill: float) -> Any:
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    for parameter in layers.parameters():
        parameter.data.fill_(fill)
    return layers


@pytest.fixture
def checkpoint(tmp_path: Path, lab_key: Any) -> Manifest:
    from entrypoint.vllm_plugin.logical import logical_state
    from entrypoint.vllm_plugin.write import write_rank

    fragment = write_rank(
        logical_state(model(7.0)),
        tmp_path,
        layout=Layout(tp=1, pp=1),
        rank=0,
        size_per_file=1 << 20,
        file_mode=0o640,
        decisions={},
        on_bytes=lambda _: None,
    )
    source = Source(name="m", revision=None, identity={})
    manifest, index = fragments.assemble(
        [fragment], [], lab_key, source, {}, "2026-01-01T00:00:00Z"
    )
    (tmp_path / INDEX).write_bytes(index)
    (tmp_path / MANIFEST).write_bytes(manifest.encode())
    return manifest


def loader(settings: dict[str, Any]) -> Any:
    from vllm.config.load import LoadConfig

    from entrypoint.vllm_plugin.load_format import ShardbootLoader

    return ShardbootLoader(LoadConfig(model_loader_extra_config=settings))


def objection() -> type[Exception]:
    from entrypoint.vllm_plugin.agreement import Objection

    return Objection


def values(layers: Any) -> set[float]:
    return {value for p in layers.parameters() for value in p.flatten().tolist()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"manifest": "x", "pattern": "y"}, "unknown setting 'pattern'"), ({}, "missing.*'manifest'")],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loader(settings)


def test_it_reads_as_it_is_told() -> None:
    from entrypoint.vllm_plugin.read import DEFAULT, Reads

    assert loader({"manifest": "x"}).reads == DEFAULT == Reads(4, 8 << 20)
    told = {"manifest": "x", "threads": 16, "read_bytes": 1 << 20}
    assert loader(told).reads == Reads(16, 1 << 20)


def test_a_checkpoint_fills_the_model_and_stays_locked(
    checkpoint: Manifest, tmp_path: Path
) -> None:
    layers = model(0.0)
    loader({"manifest": checkpoint.digest}).load_weights(
        layers, SimpleNamespace(model=str(tmp_path))
    )
    assert values(layers) == {7.0}
    with (tmp_path / MANIFEST).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_another_manifest_than_the_one_chosen_is_refused(
    checkpoint: Manifest, tmp_path: Path
) -> None:
    layers = model(0.0)
    with pytest.raises(objection(), match=f"expected the manifest 0+, found {checkpoint.digest}"):
        loader({"manifest": "0" * 64}).load_weights(layers, SimpleNamespace(model=str(tmp_path)))
    assert values(layers) == {0.0}


def test_nothing_is_written_when_a_tensor_has_another_shape(
    checkpoint: Manifest, tmp_path: Path
) -> None:
    import torch

    layers = model(0.0)
    layers[1].weight = torch.nn.Parameter(torch.zeros(4, 9))
    with pytest.raises(objection(), match=r"1\.weight: the model has F32 \[4, 9\]"):
        loader({"manifest": checkpoint.digest}).load_weights(
            layers, SimpleNamespace(model=str(tmp_path))
        )
    assert values(layers) == {0.0}


def test_nothing_is_written_when_another_rank_objects(
    checkpoint: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrypoint.vllm_plugin import compat

    monkeypatch.setattr(compat, "gather", lambda value: [value, ("", "a torn file")])
    layers = model(0.0)
    with pytest.raises(objection(), match="worker 1 objects: a torn file"):
        loader({"manifest": checkpoint.digest}).load_weights(
            layers, SimpleNamespace(model=str(tmp_path))
        )
    assert values(layers) == {0.0}


def test_a_draft_is_none_of_the_checkpoints_business(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM 0.32 loads a draft model in the target's format, whatever load format it was told.
    from entrypoint.vllm_plugin import compat

    own = SimpleNamespace(load_model=lambda _, model_config, prefix: (model_config.model, prefix))
    monkeypatch.setattr(compat, "source_loader", lambda _, load_format: {"auto": own}[load_format])
    draft = SimpleNamespace(runner_type="draft", model="/drafts/small")
    loaded = loader({"manifest": "0" * 64}).load_model(None, draft, "draft_model")
    assert loaded == ("/drafts/small", "draft_model")


def test_a_model_that_is_not_served_is_gone_before_the_source_is_loaded() -> None:
    import torch
    from torch._dynamo.convert_frame import register_bytecode_hook
    from vllm.model_executor.layers import rotary_embedding

    from entrypoint.vllm_plugin import compat

    class Compiled:
        def hook(self, *_: object) -> None: ...

    config = SimpleNamespace(compilation_config=SimpleNamespace(layers={}))
    earlier = Compiled()
    kept = register_bytecode_hook(earlier.hook)
    undo = compat.undo_registrations(config)
    refused = Compiled()
    register_bytecode_hook(refused.hook)
    rotary_embedding._ROPE_DICT["of the refused"] = refused
    config.compilation_config.layers["0"] = refused
    left = weakref.ref(refused)
    undo()
    del refused
    gc.collect()
    assert left() is None
    assert kept.id in torch._dynamo.convert_frame._bytecode_hooks
    kept.remove()


def test_fresh_tensors_show_only_while_a_model_to_prove_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    seen: list[bool] = []

    def build(*_: object, **__: object) -> None:
        seen.append(bool(torch.empty(1).isnan()))
        raise MemoryError

    monkeypatch.setattr(BaseModelLoader, "load_model", build)
    proving = loader({"manifest": "0" * 64, "prove": True, "state": str(tmp_path)})
    with pytest.raises(MemoryError):
        proving._load(None, None, "")
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def tied_config(*, tied: bool, untied_by_files: bool) -> Any:
    text = SimpleNamespace(tie_word_embeddings=tied)
    outer = SimpleNamespace(tie_word_embeddings=tied, get_text_config=lambda: text)
    return SimpleNamespace(hf_config=outer, word_embeddings_untied_by_checkpoint=untied_by_files)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("by_files", [True, False])
def test_what_vllm_decided_at_the_save_is_reproduced(tied: bool, by_files: bool) -> None:
    from entrypoint.vllm_plugin.decisions import decided, reproduce

    saved = tied_config(tied=tied, untied_by_files=by_files)
    for loaded in (
        tied_config(tied=True, untied_by_files=False),
        tied_config(tied=False, untied_by_files=True),
    ):
        reproduce(decided(saved), loaded)
        assert decided(loaded) == decided(saved)


def test_an_unknown_decision_is_refused() -> None:
    from entrypoint.vllm_plugin.decisions import decided, reproduce

    config = tied_config(tied=True, untied_by_files=False)
    with pytest.raises(KeyMismatchError, match="unknown decision 'new'"):
        reproduce(decided(config) | {"new": True}, config)
    with pytest.raises(KeyMismatchError, match="missing decision 'tie_word_embeddings'"):
        reproduce({n: v for n, v in decided(config).items() if n != "tie_word_embeddings"}, config)


def test_a_model_that_is_loaded_again_gets_the_sources_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config.load import LoadConfig

    from entrypoint.vllm_plugin import compat
    from entrypoint.vllm_plugin.tee_format import ShardbootTee

    source = SimpleNamespace(get_all_weights=lambda model_config, model: [model_config, model])
    monkeypatch.setattr(compat, "source_loader", lambda *_: source)
    told = {"staging": "/s", "source_format": "auto", "boot": "b", "state": "/t"}
    again = ShardbootTee(LoadConfig(model_loader_extra_config=told))
    assert again.get_all_weights("config", model := torch_module()) == ["config", model]


def torch_module() -> Any:
    import torch

    return torch.nn.Module()


REGISTER = """
import json, sys
from entrypoint.vllm_plugin import register
cheap = not {"torch", "vllm"} & sys.modules.keys()
register()
register()
still = not {"torch", "vllm"} & sys.modules.keys()
import vllm.model_executor.model_loader as loaders
register()
names = sorted(n for n in loaders._LOAD_FORMAT_TO_MODEL_LOADER if n.startswith("shardboot"))
print(json.dumps([cheap, still, names, loaders.__loader__ is loaders.__spec__.loader]))
"""


FORMATS = ["shardboot", "shardboot-save", "shardboot-tee", "shardboot-tune"]


def test_registering_waits_for_vllms_loaders() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", REGISTER], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == [True, True, FORMATS, True]


def test_logical_state_is_what_vllms_own_sharded_loader_expects() -> None:
    import torch
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    from entrypoint.vllm_plugin.logical import logical_state

    base, other = torch.zeros(6, 4), torch.zeros(3)
    views = {"z": base, "b": base.view(4, 6), "row": base[2], "rows": base[1:3], "flat": other}
    views |= {"part": other[:2], "whole": other[:], "none": torch.empty(0)}
    layers = torch.nn.Module()
    for name, view in views.items():
        layers.register_buffer(name, view)
    expected = ShardedStateLoader._filter_subtensors(layers.state_dict())
    assert sorted(logical_state(layers)) == sorted(expected) == ["b", "flat"]
