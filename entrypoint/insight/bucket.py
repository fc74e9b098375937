"""Probing an object store: puts, gets and lists below a prefix of its own, which is deleted.

A client's threads do not survive a fork, so every process makes its own, and the one that forks
others makes none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.errors import ShardbootError, StoreError
from entrypoint.insight import pace
from entrypoint.insight.crew import together
from entrypoint.insight.examine import Order
from entrypoint.insight.findings import FileSystem, Findings, Rate
from entrypoint.insight.overseer import Claim, Overseer, Tell
from entrypoint.insight.telling import Teller, listen
from entrypoint.store.bucket import asking
from entrypoint.store.objects import ObjectStore
from entrypoint.store.upload import delete

PREFIX: Final = "probe/shardboot-"
"""Shaped as a push's prefix is, so that whoever sweeps those takes what a killed probe left."""

_MOST_SMALL: Final = 500
_PATIENCE_SECONDS: Final = 90.0
"""The client itself gives up before, and says more than that nothing came."""


def probe(store: ObjectStore, order: Order, say: Callable[[str], None]) -> Findings:
    """Measure; return what was found. `say` hears of each step.

    Below the prefix nothing is left when this returns or raises, as far as the store answers.
    Raises: StoreError.
    """
    prefix = f"{PREFIX}{os.urandom(8).hex()}"

    def work(tell: Tell, claim: Claim) -> None:
        Examination(store, prefix, order, Teller(tell, _PATIENCE_SECONDS)).run(claim)

    def clear() -> bool:
        try:
            delete(store, prefix)
        except ShardbootError:
            return False
        return True

    overseer = Overseer(work, clear, _PATIENCE_SECONDS)
    with overseer:
        findings = listen(Findings(store.where), overseer, say)
    if not overseer.is_clear:
        text = f"what is below {store.where}/{prefix} could not be deleted"
        findings = findings._replace(failures=(*findings.failures, ("clear", text)))
    return findings


class Examination:
    """One probe of a bucket, in the process that may hang."""

    def __init__(self, store: ObjectStore, prefix: str, order: Order, teller: Teller) -> None:
        self.store, self.prefix, self.order, self.teller = store, prefix, order, teller

    def run(self, claim: Claim) -> None:
        """Measure everything; tell what comes out."""
        scheme = self.store.where.partition("://")[0]
        self.teller.found("file_system", FileSystem(scheme, "object", source=self.store.where))
        claim()
        try:
            # What cannot be reached at all is no finding but an error.
            self._conditional()
            self._large(self.order.seconds * 0.15)
            self._small(self.order.seconds * 0.08)
        except OSError as error:
            self.teller.refuse(StoreError(error.strerror or str(error)))
        else:
            self.teller.end()

    def _conditional(self) -> None:
        """Put one name twice on the condition that it is not there: the second must be refused."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        path = f"{self.prefix}/conditional"

        def work(_: int, begin: Callable[[], None]) -> int:
            begin()
            with asking(self.store.where):
                self.store.asks.put(path, b"first", mode="create")
                try:
                    self.store.asks.put(path, b"second", mode="create")
                except (AlreadyExistsError, PreconditionError):
                    return 1
            return 0

        self.teller.begin("conditional put", 0)
        self.teller.found("conditional", together(1, work).amount == 1)

    def _large(self, share: float) -> None:
        written: list[Rate] = []
        read: list[Rate] = []
        for count in (1, self.order.workers):
            most = max(1, self.order.size // 2 // count // PIECE_BYTES)
            prefix = f"{self.prefix}/large-{count}"
            with self.teller.step(f"put, {count} at once", share):
                written.append(_in_bytes(self._put(prefix, count, PIECE_BYTES, most, share)))
                self.teller.found("write", written)
            with self.teller.step(f"read, {count} at once", share):
                read.append(_in_bytes(self._visit(prefix, count, share, self._get)))
                self.teller.found("read", read)

    def _small(self, share: float) -> None:
        prefix, count = f"{self.prefix}/small", self.order.workers
        steps: tuple[tuple[str, Callable[[], Rate]], ...] = (
            ("put", lambda: self._put(prefix, count, pace.SMALL_BYTES, _MOST_SMALL, share)),
            ("head", lambda: self._visit(prefix, count, share, self._head)),
            ("get", lambda: self._visit(prefix, count, share, self._get)),
            ("list", lambda: self._list(prefix)),
            ("delete", lambda: self._visit(prefix, count, share, self._delete)),
        )
        rates: list[tuple[str, Rate]] = []
        for name, measure in steps:
            with self.teller.step(f"small files: {name}", share):
                rates.append((name, measure()))
                self.teller.found("small", rates)

    def _put(self, prefix: str, count: int, size: int, most: int, seconds: float) -> Rate:
        """Have each worker put objects until the time is over, or it has put so many."""

        def work(number: int, begin: Callable[[], None]) -> int:
            data, client = os.urandom(size), self.store.writes
            begin()
            with asking(self.store.where):
                return pace.each(
                    range(most), seconds, lambda n: client.put(f"{prefix}/{number}/{n}", data)
                )

        return together(count, work)

    def _visit(
        self, prefix: str, count: int, seconds: float, visit: Callable[[str], object]
    ) -> Rate:
        """Do something to each object that `_put` put there."""

        def work(number: int, begin: Callable[[], None]) -> int:
            paths = [stored.path for stored in self.store.list(f"{prefix}/{number}")]
            begin()
            with asking(self.store.where):
                return pace.each(paths, seconds, visit)

        return together(count, work)

    def _get(self, path: str) -> None:
        self.store.reads.get(path).bytes()

    def _head(self, path: str) -> None:
        self.store.asks.head(path)

    def _delete(self, path: str) -> None:
        self.store.asks.delete(path)

    def _list(self, prefix: str) -> Rate:
        def work(_: int, begin: Callable[[], None]) -> int:
            begin()
            return sum(1 for _ in self.store.list(prefix))

        return together(1, work)


def _in_bytes(rate: Rate) -> Rate:
    return rate._replace(amount=rate.amount * PIECE_BYTES)
