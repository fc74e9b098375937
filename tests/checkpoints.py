"""Tiny checkpoints of real safetensors bytes, built as a save builds them, without torch."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from entrypoint.checkpoint import header, index
from entrypoint.checkpoint.digest import Json, digest_bytes, digest_file
from entrypoint.checkpoint.entry import INDEX, FileEntry
from entrypoint.checkpoint.fragment import Fragment, assemble, fragment_name
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.checkpoint.layout import layout_of
from entrypoint.checkpoint.manifest import Manifest, Source
from entrypoint.checkpoint.proof import Item, summary
from entrypoint.store.staging import Staging, begin

CLOCK_REALTIME_COARSE = 5
"""The clock that stamps files (clock_gettime(2)); Python's `time` has no name for it."""

Tensor = tuple[str, str, tuple[int, ...], int]
"""Name, safetensors dtype, rank-local shape, bytes."""

TENSORS: tuple[Tensor, ...] = (
    ("lm_head.weight", "BF16", (64, 8), 1024),
    ("model.embed_tokens.weight", "BF16", (64, 8), 1024),
    ("model.layers.0.mlp.down_proj.weight", "BF16", (8, 16), 256),
    ("model.layers.0.self_attn.qkv_proj.weight", "BF16", (24, 8), 384),
    ("model.norm.weight", "F32", (8,), 32),
)

MODEL_FILES: Mapping[str, bytes] = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}\n',
    "tokenizer.json": b"{}\n",
    "templates/chat.jinja": b"{{ messages }}\n",
}


def make_key(**changes: object) -> Key:
    """Return a key of a small dense model at TP=2, with `changes`."""
    fields: dict[str, object] = {
        "model": digest_bytes(b"tiny"),
        "architecture": "LlamaForCausalLM",
        "runner": "generate",
        "tp": 2,
        "pp": 1,
        "dp": 1,
        "ep": False,
        "cp": 1,
        "eplb": False,
        "redundant_experts": 0,
        "expert_placement": "linear",
        "dtype": "bfloat16",
        "quantization": None,
        "quantization_config": "",
        "kv_cache_dtype": "auto",
        "hf_overrides": "",
        "model_impl": "auto",
        "speculative": "",
        "multimodal": "",
        "backends": {},
        "engine": "vllm",
        "vllm": "0.32.0",
        "format": FORMAT,
        "platform": "cpu",
    }
    return Key(**(fields | changes))  # type: ignore[arg-type]


def make_checkpoint(
    root: Path,
    *,
    tp: int = 2,
    parts: int = 2,
    tensors: Sequence[Tensor] = TENSORS,
    name: str | None = None,
    key: Key | None = None,
    ranks: Collection[int] | None = None,
    seed: int = 0,
    created_at: str = "2026-01-01T00:00:00Z",
) -> Manifest:
    """Publish a checkpoint in the store `root`, made if missing; return its manifest as published.

    `name` stands for the one made from the key; `ranks` are those held, None for all; `seed`
    decides the tensors' bytes.
    """
    root.mkdir(parents=True, exist_ok=True)
    key = key or make_key(tp=tp)
    with begin(root, name or "tiny") as staged:
        manifest = fill(
            staged, key, parts=parts, tensors=tensors, ranks=ranks, seed=seed, created_at=created_at
        )
        result = staged.commit(manifest.renamed(name or manifest.name), ranks)
    return manifest.renamed(result.name)


def fill(
    staged: Staging,
    key: Key,
    *,
    parts: int = 2,
    tensors: Sequence[Tensor] = TENSORS,
    ranks: Collection[int] | None = None,
    seed: int = 0,
    created_at: str = "2026-01-01T00:00:00Z",
) -> Manifest:
    """Write every file of a checkpoint but its manifest, as the ranks of a save do."""
    held = set(layout_of(key).ranks if ranks is None else ranks)
    fragments = []
    for rank in layout_of(key).ranks:
        fragment, blobs = shards(key, rank, parts, tensors, seed)
        fragments.append(fragment)
        if rank in held:
            for entry, blob in zip(fragment.files, blobs, strict=True):
                staged.write_file(entry.path, blob)
            staged.write_file(fragment_name(rank), fragment.encode())
    entries = []
    for path, data in MODEL_FILES.items():
        staged.write_file(path, data)
        entries.append(
            FileEntry(path=path, size=len(data), blake3=digest_bytes(data), role="model")
        )
    source = Source(name="test/tiny", revision=None, identity={"blake3": key.model})
    save: dict[str, Json] = {"seconds": 1, "host": "test"}
    manifest, index = assemble(fragments, entries, key, source, save, created_at)
    staged.write_file("index.json", index)
    return manifest


def shards(
    key: Key, rank: int, parts: int, tensors: Sequence[Tensor], seed: int
) -> tuple[Fragment, list[bytes]]:
    """Return what one rank writes: its fragment, and the bytes of each shard file."""
    layout = layout_of(key)
    files: list[FileEntry] = []
    entries: list[TensorEntry] = []
    blobs: list[bytes] = []
    for part in range(parts):
        path = layout.shard_name(rank, part)
        held = list(tensors[part::parts])
        head, slices = header.encode(held)
        body = [
            random.Random(f"{seed} {rank} {tensor[0]}").randbytes(tensor[3])  # noqa: S311 - test data
            for tensor in held
        ]
        blob = head + b"".join(body)
        for (name, *_), s in zip(held, slices, strict=True):
            entries.append(TensorEntry(name, rank, path, s.dtype, s.shape, s.begin, s.end))
        files.append(
            FileEntry(
                path=path,
                size=len(blob),
                blake3=digest_bytes(blob),
                role="weights",
                rank=rank,
                part=part,
                tensors=len(held),
            )
        )
        blobs.append(blob)
    fragment = Fragment(
        rank=rank, files=tuple(files), tensors=tuple(entries), decisions={"tied": False}, seconds=1
    )
    return fragment, blobs


def proof_of(manifest: Manifest) -> dict[str, Json]:
    """Return what is kept of a proof that held."""
    evidence = {"rank 0 before lm_head.weight": Item(manifest.content)}
    return summary(evidence, controlled=False, vllm=manifest.key.vllm, plugin="0.1.0")


def outlive_ctime(path: Path) -> None:
    """Wait until a change of `path` gives it another ctime.

    Before Linux 6.13 two changes within one tick, up to 10 ms, have the same.
    """
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= path.stat().st_ctime_ns:
        pass


def make_large(root: Path, *, parts: int, part_bytes: int) -> Manifest:
    """Publish one rank in `parts` files of `part_bytes` and a bit, written as a stream."""
    root.mkdir(parents=True, exist_ok=True)
    key = make_key(tp=1)
    with begin(root, "large") as staged:
        made = [_large_part(staged, part, part_bytes) for part in range(parts)]
        index_bytes = index.encode(tensor for _, tensor in made)
        staged.write_file(INDEX, index_bytes)
        entry = FileEntry(
            path=INDEX, size=len(index_bytes), blake3=digest_bytes(index_bytes), role="index"
        )
        manifest = Manifest(
            name="large",
            key=key,
            source=Source(name="test/large", revision=None, identity={}),
            layout=layout_of(key),
            files=(*(file for file, _ in made), entry),
            decisions={},
            proof=None,
            save={},
            created_at="2026-01-01T00:00:00Z",
        )
        staged.commit(manifest)
    return manifest


def _large_part(staged: Staging, part: int, size: int) -> tuple[FileEntry, TensorEntry]:
    name = f"weight.{part}"
    head, [place] = header.encode([(name, "U8", (size,), size)])
    path = f"model-rank-0-part-{part}.safetensors"
    block = random.Random(part).randbytes(1 << 24)  # noqa: S311 - test data
    with os.fdopen(staged.create(path), "wb") as file:
        file.write(head)
        for offset in range(0, size, len(block)):
            # No two blocks are equal: a disk that deduplicates must not help anyone.
            file.write((offset.to_bytes(8, "little") + block[8:])[: size - offset])
    file_entry = FileEntry(
        path=path,
        size=len(head) + size,
        blake3=digest_file(staged.path / path),
        role="weights",
        rank=0,
        part=part,
        tensors=1,
    )
    return file_entry, TensorEntry(name, 0, path, "U8", (size,), place.begin, place.end)
