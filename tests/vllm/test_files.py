"""Writing, comparing and reading shard files, on the CPU's torch and without vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint import header, index
from entrypoint.checkpoint.digest import digest_bytes, digest_file
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError, KeyMismatchError, SaveError

torch = pytest.importorskip("torch")

ALONE = Layout(tp=1, pp=1)
LIMIT = 4096


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(64, 48).to(torch.bfloat16),
        "turned": torch.randn(48, 64).t(),
        "scalar": torch.tensor(3.5),
        "mask": torch.tensor([True, False, True]),
        "packed": torch.randint(-128, 127, (16, 16), dtype=torch.int8),
        "eight": torch.randn(16, 8).to(torch.float8_e4m3fn),
        "column": torch.randn(10, 10)[:, 3],
    }


def bytes_of(tensor: Any) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o077)
    yield
    os.umask(old)


def write(state: dict[str, Any], staging: Path, limit: int = LIMIT) -> fragments.Fragment:
    from entrypoint.vllm_plugin.write import write_rank

    return write_rank(
        state,
        staging,
        layout=ALONE,
        rank=0,
        size_per_file=limit,
        file_mode=0o640,
        decisions={},
        on_bytes=lambda _: None,
    )


def manifest_of(fragment: fragments.Fragment, staging: Path, lab_key: Any) -> Manifest:
    from entrypoint.checkpoint.manifest import Source

    source = Source(name="m", revision=None, identity={})
    manifest, data = fragments.assemble([fragment], [], lab_key, source, {}, "2026-01-01T00:00:00Z")
    (staging / INDEX).write_bytes(data)
    return manifest


def compare(staging: Path, manifest: Manifest, state: dict[str, Any]) -> dict[str, Any]:
    from entrypoint.vllm_plugin.strict import compare as strictly

    return dict(strictly(staging, manifest, state, layout=ALONE, rank=0))


@pytest.mark.usefixtures("umask")
def test_files_are_what_their_fragment_says(tmp_path: Path) -> None:
    state = tensors()
    fragment = write(state, tmp_path)
    assert fragments.decode((tmp_path / fragments.fragment_name(0)).read_bytes()) == replace(
        fragment, seconds=round(fragment.seconds, 3)
    )
    assert [entry.part for entry in fragment.files] == list(range(len(fragment.files)))
    assert len(fragment.files) > 1
    for entry in fragment.files:
        path = tmp_path / entry.path
        assert path.stat().st_mode & 0o777 == 0o640
        assert (path.stat().st_size, digest_file(path)) == (entry.size, entry.blake3)
        assert len(header.read(path)) == entry.tensors
        assert entry.size <= LIMIT + 4096 or entry.tensors == 1
    for tensor in fragment.tensors:
        data = (tmp_path / tensor.file).read_bytes()[tensor.begin : tensor.end]
        assert data == bytes_of(state[tensor.name]), tensor.name


def test_safetensors_itself_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    state = tensors()
    found = {}
    for entry in write(state, tmp_path).files:
        with safetensors.safe_open(tmp_path / entry.path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert found.keys() == state.keys()
    assert all(bytes_of(found[name]) == bytes_of(state[name]) for name in state)


def test_an_existing_file_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / ALONE.shard_name(0, 0)
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write(tensors(), tmp_path)
    assert path.read_bytes() == b"mine"
    assert not (tmp_path / fragments.fragment_name(0)).exists()


def test_a_link_planted_under_the_name_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (tmp_path / ALONE.shard_name(0, 0)).symlink_to(target)
    with pytest.raises(OSError, match="exists"):
        write(tensors(), tmp_path)
    assert not target.exists()


def test_a_dtype_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"odd.*complex128") as caught:
        write({"odd": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    assert caught.value.reason == "save.dtype"


def test_every_byte_comes_back(tmp_path: Path, lab_key: Any) -> None:
    from entrypoint.vllm_plugin.read import Wanted, read_all

    state = tensors()
    manifest = manifest_of(write(state, tmp_path), tmp_path, lab_key)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    fresh["column"] = torch.zeros(10, 10)[:, 3]
    fresh["wide"] = torch.zeros(48, 64, dtype=torch.bfloat16).t()
    entries = compare(tmp_path, manifest, fresh)
    count = read_all(
        [Wanted(t, tmp_path / entries[n].file, entries[n].begin) for n, t in fresh.items()]
    )
    assert count == sum(tensor.nbytes for tensor in state.values())
    assert all(bytes_of(fresh[name]) == bytes_of(state[name]) for name in state)


def test_large_tensors_are_read_in_blocks(tmp_path: Path) -> None:
    from entrypoint.vllm_plugin.memory import blocks
    from entrypoint.vllm_plugin.read import DEFAULT, Wanted, read_all

    count = (2 * DEFAULT.size + 4096) // 4
    state = {"x": torch.arange(count, dtype=torch.int32).view(-1, 1024)}
    entry = write(state, tmp_path, limit=1).tensors[0]
    for fresh in (torch.zeros_like(state["x"]), torch.zeros(1024, count // 1024).int().t()):
        cut = [block.nbytes for block, _ in blocks(fresh, limit=DEFAULT.size)]
        assert (len(cut), max(cut)) == (3, DEFAULT.size)
        read_all([Wanted(fresh, tmp_path / entry.file, entry.begin)])
        assert torch.equal(fresh, state["x"])


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    from entrypoint.vllm_plugin.read import Wanted, read_all

    entry = write({"x": torch.ones(1000)}, tmp_path).tensors[0]
    os.truncate(tmp_path / entry.file, entry.end - 1)
    with pytest.raises(DamagedError, match="1 bytes too early"):
        read_all([Wanted(torch.zeros(1000), tmp_path / entry.file, entry.begin)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wide": torch.zeros(64, 47, dtype=torch.bfloat16)}, r"wide: .*\[64, 47\].*\[64, 48\]"),
        ({"wide": torch.zeros(64, 48, dtype=torch.float16)}, "wide: .*F16.*BF16"),
        ({"new": torch.zeros(1)}, "model has new, which it lacks"),
        ({"wide": None}, "it has wide, which the model lacks"),
    ],
)
def test_what_is_not_exactly_the_model_is_foreign(
    change: dict[str, Any], said: str, tmp_path: Path, lab_key: Any
) -> None:
    manifest = manifest_of(write(tensors(), tmp_path), tmp_path, lab_key)
    state = {name: t for name, t in (tensors() | change).items() if t is not None}
    with pytest.raises(KeyMismatchError, match=said):
        compare(tmp_path, manifest, state)


def test_another_layout_is_foreign(tmp_path: Path, lab_key: Any) -> None:
    manifest = manifest_of(write(tensors(), tmp_path), tmp_path, lab_key)
    with pytest.raises(KeyMismatchError, match="made for tp 2"):
        compare(tmp_path, manifest._replace(layout=Layout(tp=2, pp=1)), tensors())


def test_an_index_that_changed_is_damage(tmp_path: Path, lab_key: Any) -> None:
    manifest = manifest_of(write(tensors(), tmp_path), tmp_path, lab_key)
    (tmp_path / INDEX).write_bytes((tmp_path / INDEX).read_bytes() + b" ")
    with pytest.raises(DamagedError, match="expected BLAKE3"):
        compare(tmp_path, manifest, tensors())


def test_a_header_that_contradicts_the_index_is_damage(tmp_path: Path, lab_key: Any) -> None:
    fragment = write(tensors(), tmp_path)
    manifest = manifest_of(fragment, tmp_path, lab_key)
    moved = [replace(t, begin=t.begin + 2, end=t.end + 2) for t in fragment.tensors]
    data = index.encode(moved)
    (tmp_path / INDEX).write_bytes(data)
    entry = FileEntry(path=INDEX, size=len(data), blake3=digest_bytes(data), role="index")
    files = tuple(entry if e.role == "index" else e for e in manifest.files)
    with pytest.raises(DamagedError, match=r"the index says .* the header"):
        compare(tmp_path, manifest._replace(files=files), tensors())


def test_a_missing_part_is_damage(tmp_path: Path, lab_key: Any) -> None:
    fragment = write(tensors(), tmp_path)
    manifest = manifest_of(fragment, tmp_path, lab_key)
    (tmp_path / fragment.files[-1].path).unlink()
    with pytest.raises(DamagedError, match="not there"):
        compare(tmp_path, manifest, tensors())


def test_logical_state_has_every_byte_once() -> None:
    from entrypoint.vllm_plugin.logical import logical_state

    model = torch.nn.Module()
    base = torch.arange(24.0).view(4, 6)
    model.register_buffer("b_same", base)
    model.register_buffer("a_same", base.view(6, 4))
    model.register_buffer("row", base[1])
    model.register_buffer("turned", base.t())
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("other", torch.zeros(2))
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    assert sorted(logical_state(model)) == ["a_same", "other"]
