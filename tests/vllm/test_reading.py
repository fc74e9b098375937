"""Bytes to tensors, whatever these are like: cut into reads, read at once, and by detours."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64]
SHAPES = [(), (0,), (3, 0), (1,), (7,), (5, 3), (2, 3, 5), (600,), (40, 33)]
STRIDES = ["plain", "turned", "strided", "within"]


def empty(dtype: Any, shape: tuple[int, ...], strides: str) -> Any:
    """Return zeros of a shape whose elements lie as `strides` says."""
    if strides == "turned":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    if strides == "strided" and shape:
        return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    if strides == "within":
        return torch.zeros((3, *shape), dtype=dtype)[1]
    return torch.zeros(shape, dtype=dtype)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(STRIDES)),
        max_size=12,
    ),
    st.sampled_from([64, 1000, 1 << 20]),
    st.sampled_from([0, 1, 8]),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_every_tensor_gets_just_its_bytes(
    kinds: list[tuple[Any, tuple[int, ...], str]], piece: int, gap: int, short: bool, threads: int
) -> None:
    from entrypoint.vllm_plugin import read

    wanted, begin = [], 8
    path = Path(f"/dev/shm/reading-{os.getpid()}")  # noqa: S108 - memory; a name of this process
    for dtype, shape, strides in kinds:
        tensor = empty(dtype, shape, strides)
        wanted.append(read.Wanted(tensor, path, begin))
        begin += tensor.nbytes + gap
    data = os.urandom(begin).replace(b"\x00", b"\x01") if begin else b""
    # A bool is 0 or 1.
    data = bytes(byte & 1 for byte in data) if any(k[0] is torch.bool for k in kinds) else data
    path.write_bytes(data)
    preadv = os.preadv

    def few(descriptor: int, memory: list[memoryview], offset: int) -> int:
        # A read may return less than was asked for, anywhere.
        return preadv(descriptor, [memory[0][: max(1, len(memory[0]) // 2)]], offset)

    with pytest.MonkeyPatch.context() as patch:
        if short:
            patch.setattr(os, "preadv", few)
        heard: list[int] = []
        try:
            count = read.read_all(wanted[::-1], heard.append, read.Reads(threads, piece))
        finally:
            path.unlink()
    assert count == sum(heard) == sum(w.tensor.nbytes for w in wanted)
    assert max(heard, default=0) <= piece
    for w in wanted:
        plain = w.tensor.clone(memory_format=torch.contiguous_format)
        assert bytes(plain.untyped_storage()) == data[w.begin : w.begin + w.tensor.nbytes]


def test_small_neighbours_are_one_read(tmp_path: Path) -> None:
    from entrypoint.vllm_plugin.read import DEFAULT, MAX_VECTORS, Wanted, pieces

    path = tmp_path / "file"
    small = [Wanted(torch.zeros(4), path, 16 * at) for at in range(MAX_VECTORS)]
    assert [(p.begin, p.size) for p in pieces(small, DEFAULT.size)] == [(0, 16 * MAX_VECTORS)]
    turned = Wanted(torch.zeros(2, 2).t(), path, 16 * MAX_VECTORS)
    behind = Wanted(torch.zeros(4), path, 16 * (MAX_VECTORS + 2))
    elsewhere = Wanted(torch.zeros(4), tmp_path / "other", 0)
    found = list(pieces([elsewhere, behind, turned, *small[1:]], DEFAULT.size))
    assert [(p.path.name, len(p.blocks)) for p in found] == [
        ("file", MAX_VECTORS - 1),
        ("file", 1),
        ("file", 1),
        ("other", 1),
    ]


class Cuda:
    """A stand-in for `torch.cuda` that does nothing before it is waited for."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self.calls: list[str] = []
        self.Event = lambda: SimpleNamespace(record=self.record, synchronize=self.drain)
        self.Stream = lambda _: SimpleNamespace(synchronize=self.drain)

    def record(self, _: object) -> None:
        self.calls.append("record")

    def set_device(self, _: object) -> None:
        self.calls.append("set_device")

    def synchronize(self, _: object) -> None:
        self.calls.append("synchronize")

    def drain(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def stream(self, stream: Any) -> Any:
        import contextlib

        return contextlib.nullcontext(stream)


def test_a_pinned_buffer_is_read_into_again_only_when_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from entrypoint.vllm_plugin import detour

    cuda = Cuda()

    class Late:
        """A tensor on a device: what is copied to it arrives later."""

        def __init__(self) -> None:
            self.there = torch.zeros(4, dtype=torch.int16)
            self.nbytes, self.dtype, self.shape = 8, torch.int16, (4,)

        def element_size(self) -> int:
            return 2

        def copy_(self, part: Any, *, non_blocking: bool) -> None:
            assert non_blocking
            cuda.pending.append(lambda: self.there.copy_(part))

    monkeypatch.setattr(
        detour.PinnedDetour, "_buffer", staticmethod(lambda size: torch.zeros(size).byte())
    )
    way = detour.PinnedDetour(16, torch.device("cuda", 3), cuda)
    assert cuda.calls == ["set_device", "synchronize"]
    blocks = [Late() for _ in range(10)]
    for number in range(0, 10, 2):

        def read(memory: memoryview, number: int = number) -> None:
            memory[:] = bytes([number, 0] * 4 + [number + 1, 0] * 4)

        way.fill(blocks[number : number + 2], 16, read)
    way.finish()
    assert [block.there.tolist() for block in blocks] == [[number] * 4 for number in range(10)]
    assert cuda.calls[2:] == ["record"] * 5


def test_where_no_memory_can_be_pinned_the_plain_way_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from entrypoint.vllm_plugin import read
    from entrypoint.vllm_plugin.detour import Detour

    def no_memory(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(read, "PinnedDetour", no_memory)
    assert type(read.detour_to(torch.device("cuda", 0), 16)) is Detour


def test_behind_odd_bytes_another_read_begins_where_a_buffer_is_needed() -> None:
    from entrypoint.vllm_plugin.read import DEFAULT, Wanted, pieces

    odd = torch.zeros(3, 1, dtype=torch.uint8, device="meta").t()
    even = torch.zeros(2, 2, dtype=torch.bfloat16, device="meta").t()
    wanted = [Wanted(odd, Path("f"), 0), Wanted(even, Path("f"), 3), Wanted(odd, Path("f"), 11)]
    assert [(p.begin, p.size) for p in pieces(wanted, DEFAULT.size)] == [(0, 3), (3, 11)]


MEASURE = """
import resource, sys, torch
from pathlib import Path
from entrypoint.vllm_plugin.read import Wanted, read_all
path, size, turned = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "turned"
read_all([Wanted(torch.zeros(1, 8).t(), path, 0)])
fresh = torch.empty(size // 4096, 1024)
tensor = fresh.view(1024, -1).t() if turned else fresh
# Its own pages count beforehand.
fresh.fill_(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_all([Wanted(tensor, path, 0)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", ["plain", "turned"])
def test_a_load_takes_at_most_64_mib_beyond_the_parameters(tmp_path: Path, kind: str) -> None:
    size = 256 << 20
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", MEASURE, str(path), str(size), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 <= 64 << 20


def test_huge_pages_lie_within_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoint.vllm_plugin import pages

    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda begin, end, _: advised.append((begin, end)))
    huge = pages.HUGE_BYTES
    tensor = torch.empty(8 * huge, dtype=torch.uint8)
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for block in tensor.split(3 * huge + 5):
        pages.want_huge(block)
    assert all(begin % huge == end % huge == 0 for begin, end in advised)
    assert (advised[0][0], advised[-1][1]) == (-(-first // huge) * huge, last // huge * huge)
    # None is left out where two blocks meet.
    assert all(before[1] >= after[0] for before, after in itertools.pairwise(advised))


@pytest.mark.parametrize(("huge", "small"), [(1.0, 3.0), (3.0, 1.0)])
def test_pages_are_of_the_size_that_comes_faster(
    huge: float, small: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrypoint.vllm_plugin import pages

    clock, calls = 0.0, [""]

    def populate(_: object) -> None:
        nonlocal clock
        clock += huge if calls[-1] == "huge" else small
        calls.append("made")

    monkeypatch.setattr(time, "thread_time", lambda: clock)
    monkeypatch.setattr(pages, "want_huge", lambda _: calls.append("huge"))
    monkeypatch.setattr(pages, "populate", populate)
    maker, block = pages.Pages(), torch.empty(pages.TRIAL_BYTES // 2, dtype=torch.uint8)
    for _ in range(20):
        maker.make(block)
    assert calls.count("huge") == (18 if huge < small else 2)


def test_a_long_load_says_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoint.vllm_plugin import compat
    from entrypoint.vllm_plugin.progress import Progress

    clock, lines = 0.0, []
    logger = SimpleNamespace(info=lambda text, *words: lines.append(text % words))
    monkeypatch.setattr(compat, "logger", lambda: logger)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    told, silent = Progress(3, 100, "read"), Progress(4, 100, "read", every=math.inf)
    for _ in range(12):
        clock += 1
        told.heard(5)
        silent.heard(5)
    assert lines == [f"shardboot: rank 3: {n} of 100 bytes read so far" for n in (25, 50)]
    silent.finished(0.5)
    assert lines[2:] == ["shardboot: rank 4: 60 bytes read in 0.50 s (0.00 GB/s)"]


def test_so_many_threads_read_at_once_as_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entrypoint.vllm_plugin.read import Reads, Wanted, read_all

    (tmp_path / "file").write_bytes(bytes(range(240)))
    tensor, preadv = torch.zeros(240, dtype=torch.uint8), os.preadv
    # Broken, and so the test, where fewer come than are waited for.
    together = threading.Barrier(3, timeout=20)

    def met(descriptor: int, memory: list[memoryview], offset: int) -> int:
        together.wait()
        return preadv(descriptor, memory, offset)

    monkeypatch.setattr(os, "preadv", met)
    heard: list[int] = []
    read_all([Wanted(tensor, tmp_path / "file", 0)], heard.append, Reads(threads=3, size=40))
    assert heard == [40] * 6
    assert tensor.tolist() == list(range(240))
