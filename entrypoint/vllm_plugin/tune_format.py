"""The load format `shardboot-tune`: write the source in several sizes, load each as a server would.

All in the workers of one executor: vLLM takes longer to start than most models to load. Every load
builds the model anew and goes through the real loader; what a server does after it is left out.
"""

from __future__ import annotations

import datetime as dt
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from entrypoint.checkpoint import fragment as fragments
from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.index import MAX_INDEX_BYTES
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import MANIFEST, Source
from entrypoint.errors import SaveError
from entrypoint.state.files import write_atomically
from entrypoint.vllm_plugin import compat, page_cache, refusal
from entrypoint.vllm_plugin.decisions import decided
from entrypoint.vllm_plugin.load_format import ShardbootLoader
from entrypoint.vllm_plugin.logical import logical_state, refuse_unsavable
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.write import write_rank

SETTINGS = frozenset({"staging", "sizes", "runs", "file_mode", "key", "name", "source_format"})


class Trial(NamedTuple):
    """The model, written in files of one size: the manifest's digest, and this rank's files."""

    size: int
    directory: Path
    digest: str
    files: Sequence[Path]


class ShardbootTuner(BaseModelLoader):
    """Measures; the model that comes of it was never filled, and cannot serve.

    Lines in the ledger of `staging`, each with the size as `boot`: `wrote` with seconds of the
    slowest rank, bytes of all, and the most files of one; then `loaded` with seconds, and SIZE/KIND
    as `boot`, KIND being `cold` or `warm`; the first load is `SIZE/first`, and counts for nothing.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        for name in sorted(settings.keys() ^ SETTINGS):
            what = "unknown" if name in settings else "missing"
            raise ValueError(f"load format shardboot-tune: {what} setting {name!r}")
        self.settings: Mapping[str, Any] = settings
        self.staging = Path(settings["staging"])
        self.source = compat.source_loader(load_config, settings["source_format"])

    def download_model(self, model_config: Any) -> None:
        self.source.download_model(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the source's weights as vLLM does."""
        self.source.load_weights(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Write all sizes, then load each several times, in turns: the machine may drift."""
        forget = compat.undo_registrations(vllm_config)
        trials = self._write_all(vllm_config, model_config, prefix)
        for trial, kind in self._loads(trials):
            _free()
            forget()
            _prepare(trial, kind)
            loader = _Measured(self._config(trial, kind))
            with _pointing_at(model_config, trial.directory), suppress(_Loaded):
                loader.load_model(vllm_config, model_config, prefix)
        _free()
        forget()
        with compat.default_dtype(model_config.dtype):
            return compat.create_model(self, vllm_config, model_config, prefix).eval()

    def _write_all(self, vllm_config: Any, model_config: Any, prefix: str) -> list[Trial]:
        """Load the source, write it in every size that makes other files, and forget it.

        Raises: SaveError, left in staging as well.
        """
        tp, pp, rank = compat.tp_pp_rank()
        try:
            with compat.default_dtype(model_config.dtype):
                model = compat.create_model(self, vllm_config, model_config, prefix)
                refuse_unsavable(model)
                self.load_weights(model, model_config)
            state, decisions = logical_state(model), decided(model_config)
            sizes = _distinct(self.settings["sizes"], sum(t.nbytes for t in state.values()))
            layout = Layout(tp=tp, pp=pp)
            return [self._write(state, decisions, size, layout, rank) for size in sizes]
        except SaveError as error:
            refusal.leave(self.staging, rank, error.reason, str(error))
            raise

    def _write(
        self,
        state: Mapping[str, torch.Tensor],
        decisions: Mapping[str, bool],
        size: int,
        layout: Layout,
        rank: int,
    ) -> Trial:
        directory = self.staging / str(size)
        directory.mkdir(exist_ok=True)
        started = time.monotonic()
        fragment = write_rank(
            state,
            directory,
            layout=layout,
            rank=rank,
            size_per_file=size,
            file_mode=int(self.settings["file_mode"]),
            decisions=decisions,
            on_bytes=lambda _: None,
        )
        files = [directory / entry.path for entry in fragment.files]
        held = sum(entry.size for entry in fragment.files)
        ranks = compat.gather((time.monotonic() - started, len(files), held))
        digest = ""
        if rank == 0:
            seconds, counts, sizes = zip(*ranks, strict=True)
            facts = {"seconds": round(max(seconds), 3), "files": max(counts), "bytes": sum(sizes)}
            Notes(self.staging, str(size)).line("wrote", **facts)
            digest = self._publish(directory, layout)
        return Trial(size, directory, compat.gather(digest)[0], files)

    def _publish(self, directory: Path, layout: Layout) -> str:
        """Make a checkpoint of what all ranks have written; return its manifest's digest."""
        names = [directory / fragments.fragment_name(rank) for rank in layout.ranks]
        found = [fragments.decode(read_bounded(name, MAX_INDEX_BYTES)) for name in names]
        source = Source(name=str(self.settings["name"]), revision=None, identity={})
        key, now = Key.from_json(self.settings["key"]), dt.datetime.now(dt.UTC).isoformat()
        manifest, index_bytes = fragments.assemble(found, [], key, source, {}, now)
        write_atomically(directory / INDEX, index_bytes)
        write_atomically(directory / MANIFEST, manifest.encode())
        return manifest.digest

    def _loads(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, str]]:
        """Yield what to load, and how; cold only where what is cached can be dropped."""
        yield trials[0], "first"
        can_drop = all(compat.gather(page_cache.drop(trials[0].files)))
        for _ in range(int(self.settings["runs"])):
            for trial in trials:
                if can_drop:
                    yield trial, "cold"
                yield trial, "warm"

    def _config(self, trial: Trial, kind: str) -> Any:
        settings = {
            "manifest": trial.digest,
            "state": str(self.staging),
            "boot": f"{trial.size}/{kind}",
        }
        return replace(
            self.load_config, load_format="shardboot", model_loader_extra_config=settings
        )


class _Loaded(Exception):  # noqa: N818 - no error: the end of what is measured
    """The weights are in: what comes after is the same for any size."""


class _Measured(ShardbootLoader):
    """The real loader, up to where the weights are in."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the weights, and go no further. Raises: _Loaded."""
        super().load_weights(model, model_config)
        raise _Loaded


def _distinct(sizes: Sequence[int], held: int) -> list[int]:
    """Return the sizes, but of those in which each rank's state is one file only the smallest."""
    most = max(compat.gather(held))
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < most]


def _prepare(trial: Trial, kind: str) -> None:
    """Bring the page cache into the state that `kind` says, on every rank before any goes on."""
    if kind == "cold":
        page_cache.drop(trial.files)
    else:
        page_cache.fetch(trial.files)
    compat.gather(None)


@contextmanager
def _pointing_at(model_config: Any, directory: Path) -> Iterator[None]:
    """Let `model_config` name the checkpoint while it is loaded, and the source again after."""
    source, model_config.model = model_config.model, str(directory)
    try:
        yield
    finally:
        model_config.model = source


def _free() -> None:
    """Give back the memory of the model before: a server's is fresh."""
    gc.collect()
    torch.accelerator.empty_cache()
