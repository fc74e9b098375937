"""What looking at a store gives. Plain values that `plan` decides on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from entrypoint.checkpoint.key import Difference
from entrypoint.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint with the wanted key whose files are what its manifest says."""

    manifest: Manifest
    path: str
    word = "complete"


@dataclass(frozen=True, slots=True)
class Absent:
    """No checkpoint at all; or no store was named, which `why` then says."""

    why: str = ""
    word = "absent"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Only checkpoints made for something else; the one with the fewest differences."""

    name: str
    differences: tuple[Difference, ...]
    word = "foreign"


@dataclass(frozen=True, slots=True)
class Damaged:
    """The wanted key, but files that are not what the manifest says."""

    name: str
    discrepancies: tuple[str, ...]
    word = "damaged"


@dataclass(frozen=True, slots=True)
class Rejected:
    """The wanted key, but known not to serve: by a failed proof, a loader, a crash loop, a person.

    `kind` is one of `unproven`, `unfit`, `quarantined`, `operator`.
    """

    name: str
    kind: str
    reason: str
    word = "rejected"


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The store could not be looked at."""

    error: str
    word = "unreachable"


Finding: TypeAlias = Complete | Absent | Foreign | Damaged | Rejected | Unreachable
