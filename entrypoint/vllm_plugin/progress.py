"""A line every few seconds about what takes long in a worker."""

from __future__ import annotations

import time

from entrypoint.vllm_plugin import compat

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Says every so many seconds how much of a rank is `done`: written, or read."""

    def __init__(
        self, rank: int, total: int, done: str, every: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self.rank, self.total, self.done, self.every = rank, total, done, every
        self.count = 0
        self.last = time.monotonic()
        self.logger = compat.logger()

    def heard(self, count: int) -> None:
        """Count more bytes; say a line if the last one is long ago."""
        self.count += count
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            self.logger.info(
                "shardboot: rank %d: %d of %d bytes %s so far",
                *(self.rank, self.count, self.total, self.done),
            )

    def finished(self, seconds: float) -> None:
        """Say what it took."""
        self.logger.info(
            "shardboot: rank %d: %d bytes %s in %.2f s (%.2f GB/s)",
            *(self.rank, self.count, self.done, seconds),
            self.count / max(seconds, 1e-6) / 1e9,
        )
