from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.checkpoint import header
from entrypoint.checkpoint.header import BITS, Slice
from entrypoint.errors import DamagedError

Tensor = tuple[str, str, tuple[int, ...], int]

TENSORS: list[Tensor] = [
    ("a", "BF16", (2, 3), 12),
    ("b.weight", "I8", (5,), 5),
    ("scalar", "F32", (), 4),
    ("empty", "F16", (0, 7), 0),
]


def written(path: Path, tensors: list[Tensor]) -> list[Slice]:
    head, slices = header.encode(tensors)
    body = b"".join(bytes([i % 251]) * size for i, (*_, size) in enumerate(tensors))
    path.write_bytes(head + body)
    return slices


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[Tensor]:
    names = draw(st.sets(st.text(max_size=12).filter(lambda n: n != "__metadata__"), max_size=6))
    tensors = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        count = 1
        for n in shape:
            count *= n
        tensors.append((name, dtype, shape, count * BITS[dtype] // 8))
    return tensors


@given(tensor_lists())
def test_what_was_laid_out_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Tensor]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    slices = written(path, tensors)
    found = header.read(path)
    assert found == dict(zip([name for name, *_ in tensors], slices, strict=True))
    assert all(s.begin >= 8 for s in slices)


def test_tensors_start_on_a_multiple_of_64(tmp_path: Path) -> None:
    slices = written(tmp_path / "x", TENSORS)
    assert slices[0].begin % 64 == 0


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    written(path, TENSORS)
    found = dict(safetensors.deserialize(path.read_bytes()))
    for name, dtype, shape, size in TENSORS:
        assert found[name]["dtype"] == dtype
        assert tuple(found[name]["shape"]) == shape
        assert len(found[name]["data"]) == size
        s = header.read(path)[name]
        assert bytes(found[name]["data"]) == path.read_bytes()[s.begin : s.end]


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "x.safetensors"
    library.save_file({"x": numpy.zeros((2, 2), "f4"), "y": numpy.zeros(3, "i1")}, path)
    found = header.read(path)
    assert {name: (s.dtype, s.shape, s.end - s.begin) for name, s in found.items()} == {
        "x": ("F32", (2, 2), 16),
        "y": ("I8", (3,), 3),
    }


def test_every_dtype_of_the_library_is_known() -> None:
    safetensors = pytest.importorskip("safetensors")
    for dtype, bits in BITS.items():
        head, _ = header.encode([("x", dtype, (8,), bits)])
        try:
            safetensors.deserialize(head + bytes(bits))
        except safetensors.SafetensorError:
            # Some came after this version of the library.
            assert dtype.startswith(("F8_", "C64"))


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    written(path, TENSORS)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedError):
            header.read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedError, match="declares"):
        header.read(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "an empty file"),
        (b"\0" * 4096, "zeros, as a crash"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x02}q\x00" + bytes(100), "pickle"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"<!DOCTYPE html><html>404</html>", "HTML"),
        (b"<html><body>502</body></html>", "HTML"),
        (b"\x1f\x8b\x08\x00" + bytes(100), "gzip"),
        (b"abc", "3 bytes"),
        (b"\xff" * 100, "header length 18446744073709551615"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_file_is_instead_is_said_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=words):
        header.read(path)


def entry(
    dtype: object = "I8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ODD: list[tuple[str, object]] = [
    ("a list", []),
    ("a number", 3),
    ("entry a word", {"x": "y"}),
    ("no dtype", {"x": {"shape": [4], "data_offsets": [0, 4]}}),
    ("dtype unknown", {"x": entry("I7")}),
    ("dtype a list", {"x": entry(["I8"])}),
    ("shape negative", {"x": entry(shape=[-4])}),
    ("shape a float", {"x": entry(shape=[4.0])}),
    ("shape true", {"x": entry(shape=[True, 4])}),
    ("shape a word", {"x": entry(shape="four")}),
    ("shape null", {"x": entry(shape=None)}),
    ("shape huge", {"x": entry(shape=[10**30])}),
    ("shape huge and empty", {"a": entry(shape=[0, 1 << 63], offsets=(0, 0)), "x": entry()}),
    ("shape endless", {"x": entry(shape=[1] * 64 + [4])}),
    ("gap before", {"x": entry(offsets=(1, 5))}),
    ("gap between", {"x": entry(shape=[2], offsets=(0, 2)), "y": entry(offsets=(3, 7))}),
    ("overlap", {"x": entry(), "y": entry(offsets=(2, 6))}),
    ("backwards", {"x": entry(offsets=(4, 0))}),
    ("beyond the file", {"x": entry(shape=[40], offsets=(0, 40))}),
    ("too few bytes", {"x": entry(shape=[3])}),
    ("offset a float", {"x": entry(offsets=(0, 4.0))}),
    ("offset true", {"x": entry(shape=[1], offsets=(False, True))}),
    ("offsets null", {"x": entry(offsets=None)}),
    ("one offset", {"x": entry(offsets=(0,))}),
    ("no offset", {"x": entry(offsets=())}),
    ("three offsets", {"x": entry(offsets=(0, 4, 8))}),
    ("offset a word", {"x": entry(), "y": entry(offsets=("4", 8))}),
    ("offset null", {"x": entry(), "y": entry(offsets=(None, 8))}),
]  # fmt: skip


@pytest.mark.parametrize("table", [pytest.param(table, id=name) for name, table in ODD])
def test_a_header_that_does_not_add_up_is_damaged(tmp_path: Path, table: object) -> None:
    text = json.dumps(table).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
    with pytest.raises(DamagedError, match=r"x\.safetensors"):
        header.read(path)


@pytest.mark.parametrize("text", [b"{", b"[" * 50_000, b"\xff\xff", b'{"x": NaN}', b"nul"])
def test_a_header_that_is_no_json_is_damaged(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(DamagedError):
        header.read(path)


def test_no_changed_byte_of_a_header_raises_anything_else() -> None:
    head, _ = header.encode(TENSORS)
    text = head[8:]
    size = len(head) + sum(tensor[3] for tensor in TENSORS)
    for position in range(len(text)):
        for other in b'0.9",:[]{} x\xff':
            mutated = text[:position] + bytes([other]) + text[position + 1 :]
            try:
                header.parse(mutated, size, "x")
            except DamagedError:
                continue
