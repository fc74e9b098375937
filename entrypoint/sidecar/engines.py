"""Who made a checkpoint: a vLLM that serves here, or a later one, which an upgrade brings. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Iterable
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

Maker = tuple[str, int]
"""vLLM's version, as it tells it, and our format."""

BEFORE_ALL: Final = Version("0.dev0")


class Engines(NamedTuple):
    """The makers whose checkpoints boots of this node have served, and how late the latest is."""

    served: frozenset[Maker]
    latest: tuple[Version, int] | None

    @classmethod
    def of(cls, served: Iterable[Maker]) -> "Engines":
        """Return these makers, and when the latest of them came."""
        found = frozenset(served)
        return cls(found, max(map(released, found), default=None))

    def has(self, maker: Maker) -> bool:
        """Tell whether one of its checkpoints was served here."""
        return maker in self.served

    def is_ahead(self, maker: Maker) -> bool:
        """Tell whether it comes after all whose were."""
        return self.latest is not None and released(maker) > self.latest


def released(maker: Maker) -> tuple[Version, int]:
    """Return what puts makers in order: what is no version (PEP 440) comes first."""
    vllm, form = maker
    try:
        return Version(vllm), form
    except InvalidVersion:
        return BEFORE_ALL, form
