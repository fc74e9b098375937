"""Proofs that were made here: which count, and how one goes along to the shared store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoints import make_checkpoint, proof_of
from store_contract import deep_verify

from entrypoint import publishing
from entrypoint.assess import Boot, rejections_by
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Complete
from entrypoint.checkpoint.inspect import read_manifest
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.config import resolve
from entrypoint.errors import ManifestError, NotFoundError
from entrypoint.log import Log
from entrypoint.sidecar.compare import rows
from entrypoint.sidecar.view import Manifests, see_local, see_shared
from entrypoint.state.files import MAX_STATE_BYTES
from entrypoint.state.memory import Memory
from entrypoint.state.proofs import Proofs
from entrypoint.state.reporter import Reporter
from entrypoint.state.status import Address
from entrypoint.store import look
from entrypoint.store.directory import DirectoryStore

MOE = cast("Any", SimpleNamespace(unruled="moe", nnodes=1, asked="words"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "local")


@pytest.fixture
def shared(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "shared").mkdir()
    return DirectoryStore(tmp_path / "shared")


@pytest.fixture
def manifest(local: DirectoryStore) -> Manifest:
    """Return a local checkpoint that came without a proof."""
    return make_checkpoint(local.root)


@pytest.fixture
def boot(state: Path) -> Boot:
    settings = resolve({"state_dir": str(state), "reserve_bytes": "0"}, {})
    return Boot(settings, (), {}, Log("b", descriptor=-1), Reporter(None, "b", Address()))


def kept(state: Path, manifest: Manifest) -> Path:
    return state / "proofs" / f"{manifest.content}.json"


def with_proof(**changes: Any) -> Any:
    """Return how to make a proof file with another field, or, for `...`, without it."""

    def make(manifest: Manifest) -> bytes:
        proof = {k: v for k, v in (proof_of(manifest) | changes).items() if v is not ...}
        return json.dumps({"content": manifest.content, "proof": proof}).encode()

    return make


ODD = [
    pytest.param(lambda _: b"", "kept: expected an object", id="empty"),
    pytest.param(lambda m: with_proof()(m)[:-9], "kept: expected an object", id="torn"),
    pytest.param(lambda _: b"[" * 99_999, "kept: expected an object", id="deeply nested"),
    pytest.param(
        lambda m: json.dumps(proof_of(m)).encode(), "kept.content: missing field", id="a bare proof"
    ),
    pytest.param(
        lambda m: with_proof()(m).replace(m.content.encode(), b"0" * 64, 1),
        "kept.content: expected",
        id="made for another checkpoint",
    ),
    pytest.param(with_proof(vllm="0.31.0"), r"proof.vllm: expected 0\.32\.0", id="another vLLM"),
    pytest.param(with_proof(items=...), "proof.items: missing", id="a field less"),
    pytest.param(with_proof(more=1), "proof.more: unknown", id="a field more"),
    pytest.param(with_proof(items=float("nan")), "proof.items", id="not a number"),
    pytest.param(with_proof(items=1.5), "proof.items", id="half an item"),
    pytest.param(with_proof(items=True), "proof.items", id="true items"),
    pytest.param(with_proof(unprobed="many"), "proof.unprobed: expected a list", id="no list"),
    pytest.param(with_proof(unprobed=["\ud800"]), "proof.unprobed: expected a text", id="no text"),
    pytest.param(with_proof(controlled=1), "proof.controlled", id="1 for true"),
    pytest.param(with_proof(in_place="yes"), "proof.in_place", id="in place or not"),
    pytest.param(with_proof(evidence="0"), "proof.evidence", id="no digest"),
    pytest.param(with_proof(plugin=None), "proof.plugin", id="no plugin"),
    pytest.param(
        lambda m: with_proof()(m) + b" " * MAX_STATE_BYTES,
        "kept: expected an object",
        id="too large",
    ),
]


@pytest.mark.parametrize(("make", "said"), ODD)
def test_what_is_no_proof_of_this_content_counts_as_none_and_goes_nowhere(
    boot: Boot,
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    make: Any,
    said: str,
) -> None:
    state = boot.settings.state_dir
    kept(state, manifest).parent.mkdir(parents=True)
    kept(state, manifest).write_bytes(make(manifest))
    with pytest.raises(ManifestError, match=said):
        Proofs(state).read(manifest)
    assert Proofs(state).find(manifest) is None
    rejection = rejections_by(boot.settings, MOE)(manifest)
    assert rejection is not None
    assert rejection.kind == "unproved"
    with pytest.raises(NotFoundError, match="what is kept as its proof cannot go along") as caught:
        publishing.publish(boot, local, shared, manifest)
    assert "shardboot prove" in caught.value.hint
    assert os.listdir(shared.root) == []


@pytest.mark.parametrize("more", [{}, {"in_place": True}])
def test_a_proof_goes_along_and_the_checkpoint_here_stays_as_it_is(
    boot: Boot,
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    more: dict[str, Json],
) -> None:
    proof = proof_of(manifest) | more
    Proofs(boot.settings.state_dir).add(manifest, proof)
    before = (local.path(manifest.name) / MANIFEST).read_bytes()
    published = publishing.publish(boot, local, shared, manifest)
    assert (local.path(manifest.name) / MANIFEST).read_bytes() == before
    there = read_manifest(shared.path(manifest.name))
    assert there == published == manifest._replace(proof=proof)
    assert there.content == manifest.content
    assert there.digest != manifest.digest
    deep_verify(shared, there.name)
    assert publishing.publish(boot, local, shared, manifest) == published
    assert shared.names() == [manifest.name]


def test_without_a_proof_it_goes_as_it_is(
    boot: Boot, shared: DirectoryStore, local: DirectoryStore, manifest: Manifest
) -> None:
    publishing.publish(boot, local, shared, manifest)
    assert read_manifest(shared.path(manifest.name)) == manifest


def test_a_proof_that_a_manifest_has_no_room_for_goes_nowhere(
    boot: Boot,
    shared: DirectoryStore,
    local: DirectoryStore,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Proofs(boot.settings.state_dir).add(manifest, proof_of(manifest))
    limit = len(manifest.encode())
    monkeypatch.setattr("entrypoint.checkpoint.manifest.MAX_MANIFEST_BYTES", limit)
    with pytest.raises(NotFoundError, match=rf"bytes, expected at most {limit}"):
        publishing.publish(boot, local, shared, manifest)
    assert os.listdir(shared.root) == []


def test_beside_the_same_without_a_proof_it_is_the_next_generation_and_other_nodes_take_that(
    boot: Boot, shared: DirectoryStore, local: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    first = publishing.publish(boot, local, shared, manifest)
    Proofs(boot.settings.state_dir).add(manifest, proof_of(manifest))
    second = publishing.publish(boot, local, shared, manifest)
    assert (first.proof, first.content) == (None, second.content)
    assert shared.names() == [f"{manifest.name}-g2", manifest.name]
    elsewhere = resolve({"state_dir": str(tmp_path / "elsewhere")}, {})
    wanted = look.Wanted(manifest.key, lambda _: True, rejections_by(elsewhere, MOE))
    found = look.look(shared, wanted, Memory(tmp_path / "elsewhere"))
    assert isinstance(found, Complete)
    assert found.manifest == second


def test_with_and_without_its_proof_it_is_one_checkpoint_in_two_stores(
    boot: Boot, shared: DirectoryStore, local: DirectoryStore, manifest: Manifest
) -> None:
    Proofs(boot.settings.state_dir).add(manifest, proof_of(manifest))
    publishing.publish(boot, local, shared, manifest)
    memory = Memory(boot.settings.state_dir)
    here = see_local(local, Manifests(local), memory, {}).seen
    there = see_shared(shared, Manifests(shared), memory).seen
    [row] = rows(here, there)
    assert (row.here, row.there) == (here[0], there[0])
    assert [(each.proved, each.sealed) for each in (*here, *there)] == [(True, False), (True, True)]


@pytest.mark.parametrize(("nnodes", "is_enough"), [(1, True), (2, False)])
def test_over_nodes_only_a_proof_that_all_of_them_see_counts(
    boot: Boot, manifest: Manifest, nnodes: int, is_enough: bool
) -> None:
    moe = cast("Any", SimpleNamespace(unruled="moe", nnodes=nnodes, asked=""))
    Proofs(boot.settings.state_dir).add(manifest, proof_of(manifest))
    assert (rejections_by(boot.settings, moe)(manifest) is None) == is_enough
    assert rejections_by(boot.settings, moe)(manifest._replace(proof=proof_of(manifest))) is None
