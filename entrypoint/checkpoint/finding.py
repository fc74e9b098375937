"""What looking at a store gives. Plain values that `plan` decides on."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Collection
from typing import NamedTuple, Self, TypeAlias

from entrypoint.checkpoint.key import Difference
from entrypoint.checkpoint.manifest import Manifest


class Complete(NamedTuple):
    """A checkpoint with the wanted key whose files are what its manifest says.

    `ranks` are those that lie there, where they are not all: `ranks 2-3 of 4`.
    """

    manifest: Manifest
    path: str
    ranks: str = ""

    @classmethod
    def of(cls, manifest: Manifest, path: str, held: Collection[int]) -> Self:
        """Return the finding for a checkpoint of which the files of `held` lie at `path`."""
        layout = manifest.layout
        return cls(manifest, path, "" if len(held) == layout.world else layout.in_words(held))


class Absent(NamedTuple):
    """No checkpoint at all; or one of other ranks, or no store was named, which `why` then says."""

    why: str = ""


class Foreign(NamedTuple):
    """Only checkpoints made for something else; the one with the fewest differences."""

    name: str
    differences: tuple[Difference, ...]


class Damaged(NamedTuple):
    """The wanted key, but files that are not what the manifest says."""

    name: str
    discrepancies: tuple[str, ...]


class Rejected(NamedTuple):
    """The wanted key, but known not to serve: by a failed proof, a loader, a crash loop, a person.

    `kind` is one of `unproven`, `unfit`, `quarantined`, `operator`; `unproved` where it only
    waits for its proof, `never-loaded` where one boot passes it by.
    """

    name: str
    kind: str
    reason: str


class Unreachable(NamedTuple):
    """The store could not be looked at."""

    error: str


Finding: TypeAlias = Complete | Absent | Foreign | Damaged | Rejected | Unreachable


WORDS: dict[type[Finding], str] = {
    Complete: "complete",
    Absent: "absent",
    Foreign: "foreign",
    Damaged: "damaged",
    Rejected: "rejected",
    Unreachable: "unreachable",
}


def word_of(finding: Finding) -> str:
    """Return the one word for a finding, as plans and reason codes use it."""
    return WORDS[type(finding)]
