"""Saving what a server has just loaded from its source, while it goes on.

Post-processing changes parameters in place, so a rank copies them to host memory first and writes
the copy from a thread; where that memory is not free, it writes them before it goes on. Whoever
finishes last has them committed. The server neither fails for it, nor waits for another rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.checkpoint.fragment import fragment_name
from entrypoint.checkpoint.key import Key
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.proof import rank_evidence_name
from entrypoint.errors import KeyMismatchError, SaveError, ShardbootError
from entrypoint.headroom import free_bytes
from entrypoint.state.rejections import UNPROBED, on_the_way
from entrypoint.store import order as orders
from entrypoint.store import staging as stagings
from entrypoint.store.order import UNCLAIMED
from entrypoint.store.staging import Staging
from entrypoint.vllm_plugin import compat, same_engine
from entrypoint.vllm_plugin.decisions import decided
from entrypoint.vllm_plugin.evidence import Entries, Recorder, after, circumstances, loose_state
from entrypoint.vllm_plugin.logical import logical_state, refuse_unsavable
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.pages import Pages
from entrypoint.vllm_plugin.write import write_rank

FINISHER: Final = "entrypoint.finisher"
NICE: Final = 10
"""The writer's priority: vLLM's own threads go first."""

State = Mapping[str, torch.Tensor]


class Tee:
    """One rank's part of a tee. `wanted`: bytes of host memory that vLLM will still take itself."""

    def __init__(self, staging: Staging, notes: Notes, wanted: int) -> None:
        self.staging, self.notes, self.wanted = staging, notes, wanted
        self.order: Mapping[str, Any] = {}
        self.is_over = False
        tp, pp, self.rank = compat.tp_pp_rank()
        self.layout = Layout(tp=tp, pp=pp)
        self.started = 0.0
        self.recorder: Recorder | None = None
        self.loose: Entries = {}
        self.recorded = threading.Event()

    @classmethod
    def join(cls, directory: str, notes: Notes, wanted: int) -> Tee | None:
        """Take part in the tee that boot began in `directory`; None where it is over already.

        Where this rank cannot take part, it is over for all.
        """
        try:
            staging = stagings.join(Path(directory))
        except ShardbootError as error:
            compat.logger().warning("shardboot: nothing is saved on the way: %s", error)
            return None
        tee = cls(staging, notes, wanted)
        with tee._giving_up():
            tee.order = orders.read(staging.path)
            staging.dir_mode = int(tee.order["dir_mode"])
            if tee.order.get("record"):
                tee.recorder = Recorder(staging.path, "source")
        return None if tee.is_over else tee

    def require_same_engine(self, vllm_config: Any) -> None:
        """Give the tee up where boot went by an answer of vLLM that does not hold any more.

        The checkpoint would say that it is another engine's. The next boot asks anew.
        """
        with self._giving_up():
            try:
                same_engine.require_same_engine(Key.from_json(self.order["of"]["key"]), vllm_config)
            except KeyMismatchError as error:
                self.notes.forget_answers()
                raise SaveError(f"the key does not hold: {error}") from None

    def examine(self, model: torch.nn.Module) -> None:
        """Give the tee up for a model that has no state to save, before anything is read."""
        with self._giving_up():
            refuse_unsavable(model)
            if self.recorder is not None:
                self.loose = loose_state(model)

    def take(self, model: torch.nn.Module, model_config: Any) -> None:
        """Save the state that `model` has now; on return it may change, and the rest goes on."""
        if self.is_over:
            return
        self.started = time.monotonic()
        with self._giving_up():
            decisions = decided(model_config)
            if self.recorder is None:
                self.recorded.set()
            else:
                self._refuse_loose(model)
                self.recorder.before(model)
            state = logical_state(model)
            size = sum(tensor.nbytes for tensor in state.values())
            rest = []
            if self._has_room(size):
                rest.append(copied(state))
                how = "copied, and written while vLLM goes on"
            else:
                self._write(state, decisions)
                how = "written first, since host memory is short"
            seconds = time.monotonic() - self.started
            self._say(f"{size} bytes to save, {how}: it waited {seconds:.1f} s")
            threading.Thread(
                target=self._go_on, args=(rest, decisions), daemon=True, name="shardboot-tee"
            ).start()

    def _refuse_loose(self, model: torch.nn.Module) -> None:
        """Refuse a model whose own `load_weights` kept more than parameters and buffers.

        A load from files never calls it, so that no checkpoint brings that back.
        """
        now = loose_state(model)
        for name in sorted(self.loose.keys() | now.keys()):
            if self.loose.get(name) != now.get(name):
                msg = f"{name} is set as weights are loaded, and is neither parameter nor buffer"
                raise SaveError(msg, reason=UNPROBED)

    def record(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Record what the post-processed model computes, if the next load is to prove it by that.

        Nothing is committed before. What cannot be probed, or computes something else when asked
        again at once, is proved by no load alone.
        """
        if self.recorder is None or self.is_over:
            return
        with self._giving_up():
            found, again = after(model, vllm_config), after(model, vllm_config)
            for name, entry in found.items():
                if isinstance(entry, dict) and "unprobed" in entry:
                    msg = f"{name} cannot be probed, so a load alone proves nothing of it"
                    raise SaveError(msg, reason=UNPROBED)
                if entry != again.get(name):
                    msg = f"{name} does not compute the same twice, so nothing can be told by it"
                    raise SaveError(msg, reason=UNPROBED)
            self.recorder.write(found, circumstances(vllm_config))
        self.recorded.set()

    def give_up(self, error: ShardbootError) -> None:
        """Take the tee from all ranks, and say why; the first one to do so is heard.

        What no later tee would do better is remembered of all of them.
        """
        self.is_over = True
        key = str(self.order.get("key_by_config", ""))
        if error.reason == UNPROBED:
            self.notes.reject(on_the_way(key), UNPROBED, str(error))
        self.notes.refuse(key, error.reason, str(error))
        if self.staging.give_up():
            text = f"no checkpoint is saved on the way, and the server goes on: {error}"
            compat.logger().error("shardboot: %s: %s", error.reason, text)
            self.notes.line("tee.failed", reason=error.reason, text=str(error))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the tee up for what goes wrong in the block: whatever it is, the server is well."""
        try:
            with self.staging.writing(""):
                yield
        except ShardbootError as error:
            self.give_up(error)
        # torch has no narrower word than RuntimeError for memory that it does not get.
        except (RuntimeError, MemoryError, AssertionError, *MALFORMED) as error:
            self.give_up(SaveError(f"{type(error).__name__}: {error}"))

    def _has_room(self, size: int) -> bool:
        """Tell whether host memory holds a copy of every rank's state twice, and what vLLM wants.

        All ranks of this node ask at about the same time, and post-processing needs some as well.
        """
        return size <= (free_bytes() // int(self.order["world"]) - self.wanted) // 2

    def _go_on(self, rest: list[State], decisions: Mapping[str, bool]) -> None:
        """Write the copy, if there is one, and let it go; commit, if all have been written.

        A thread keeps its arguments until it ends: only what is taken out of a list is freed.
        """
        with self._giving_up():
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            while rest:
                self._write(rest.pop(), decisions)
            self.recorded.wait()
            if self._is_last():
                self._finish()

    def _write(self, state: State, decisions: Mapping[str, bool]) -> None:
        write_rank(
            state,
            self.staging.path,
            layout=self.layout,
            rank=self.rank,
            size_per_file=int(self.order["size_per_file"]),
            file_mode=int(self.order["file_mode"]),
            decisions=decisions,
            on_bytes=lambda _: None,
        )

    def _is_last(self) -> bool:
        """Tell whether all ranks have written and this one is to commit; no two are told so."""
        ranks = range(int(self.order["world"]))
        names = [fragment_name(rank) for rank in ranks]
        if self.recorder is not None:
            names += [rank_evidence_name("source", rank) for rank in ranks]
        if not all((self.staging.path / name).exists() for name in names):
            return False
        try:
            (self.staging.path / UNCLAIMED).unlink()
        except FileNotFoundError:
            return False
        return True

    def _finish(self) -> None:
        """Have what lies in staging committed, in a process that does not share our interpreter.

        Raises: SaveError.
        """
        seconds = time.monotonic() - self.started
        command = [sys.executable, "-P", "-m", FINISHER, str(self.staging.path)]
        timeout = float(self.order["save_timeout"])
        try:
            done = subprocess.run(
                [*command, f"{seconds:.3f}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            msg = f"its last process took longer than {timeout:.0f} s and was ended"
            raise SaveError(msg, reason="save.timeout") from None
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise SaveError(f"its last process ended with status {done.returncode}") from None
        if answer["status"] != "ok":
            raise SaveError(answer["message"], reason=answer["reason"])
        seconds = time.monotonic() - self.started
        self._say(f"tee.done: {answer['name']} is there, {seconds:.1f} s after loading")
        self.notes.line("tee.done", checkpoint=answer["name"], seconds=round(seconds, 3))

    def _say(self, text: str) -> None:
        compat.logger().info("shardboot: rank %d: %s", self.rank, text)


def copied(state: State) -> State:
    """Return the tensors as they are now, row by row in memory of their own on the host."""
    pages = Pages()
    copies = {}
    for name, tensor in state.items():
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        pages.make(copies[name])
        copies[name].copy_(tensor)
    return copies
