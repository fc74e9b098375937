"""The source as one boot sees it: looked at once, and read only when nothing cheaper tells."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.log import Log
from entrypoint.model.access import not_readable, unreadable
from entrypoint.model.contents import is_needed
from entrypoint.model.identity import (
    Identity,
    last_remembered,
    learn,
    read_in_full,
    remember_word,
    remembered,
)
from entrypoint.model.survey import Survey, survey
from entrypoint.state.memory import Memory


class StandIn(NamedTuple):
    """A checkpoint of a model that is not on this node, for the sake of its model files.

    `model_files`: the BLAKE3 of each, by its path. `laid_out()` gives a directory with them and
    nothing else, verified; gone afterwards.
    """

    name: str
    model_files: Mapping[str, str]
    laid_out: Callable[[], AbstractContextManager[str]]


class SourceView:
    """The source as far as it had to be looked at; grows lazily, and only by looking.

    `find_stand_in(word, commit)` is asked where the source is not on this node.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        memory: Memory,
        log: Log,
        find_stand_in: Callable[[str, str | None], StandIn | None],
    ) -> None:
        self.environ, self.memory, self.log = environ, memory, log
        self.survey: Survey | None = None
        self.identity = Identity({}, {})
        self.stand_in: StandIn | None = None
        self._find_stand_in = find_stand_in
        self._is_opened = False

    def identify(self, word: str, revision: str | None) -> Identity | None:
        """Look at the source once; None when it hangs."""
        if self.survey is None:
            self.survey = survey(word, revision, self.environ)
            if self.survey.timed_out:
                self.log.line(
                    "source.hung", f"{word} does not answer; going by what it was when last seen"
                )
                known = last_remembered(word, revision, self.environ, self.memory)
                self.identity = known or self.identity
            else:
                self.identity = self._recall()
                remember_word(self.survey, self.identity, revision, self.environ, self.memory)
            if self.survey.directory is None and not self.survey.timed_out:
                self.stand_in = self._find_stand_in(word, self.survey.revision)
            if self.stand_in is not None:
                self.identity = Identity(self.stand_in.model_files, {})
        return None if self.survey.timed_out else self.identity

    def borrow(self, word: str, revision: str | None) -> AbstractContextManager[str | None]:
        """Yield a directory with the config of a model that is not here, or None."""
        self.identify(word, revision)
        if self.stand_in is None:
            return nullcontext()
        text = f"{word} is not on this machine; {self.stand_in.name} tells its config"
        self.log.line("source.elsewhere", text)
        return self.stand_in.laid_out()

    def _recall(self) -> Identity:
        known = remembered(self.here, self.memory)
        if known is not None:
            return known
        self.require_readable()
        return learn(self.here, self.memory)

    def require_readable(self) -> None:
        """Find out whether this user may read the weights that are here.

        A hit has no need of it, and on a network each file costs a round trip.
        Raises: OwnershipError where it may not read what vLLM cannot do without.
        """
        if self.survey is None or self.survey.directory is None or self._is_opened:
            return
        self._is_opened = True
        root = Path(self.survey.directory)
        for path in unreadable(str(root), [file.path for file in self.survey.weights]):
            if is_needed(path):
                raise not_readable(str(root / path))
            self.survey = self.survey._replace(denied=str(root / path))

    @property
    def here(self) -> Survey:
        """The look that was taken."""
        assert self.survey is not None
        return self.survey

    def is_same_model(self, manifest: Manifest, *, named: bool) -> bool:
        """Whether a checkpoint was saved from this very source.

        Reads the weights only when nothing cheaper tells. Without the source here, only a full
        commit hash matches, or a checkpoint that the operator named.
        """
        theirs = manifest.source.identity
        for way in ("blake3", "sha256"):
            if way in theirs and way in self.identity.ways:
                return theirs[way] == self.identity.ways[way]
        if self.here.directory is None:
            same_commit = (
                self.here.revision is not None
                and self.here.word == manifest.source.name
                and self.here.revision == manifest.source.revision
            )
            return same_commit or (named and not self.here.timed_out)
        if "blake3" not in theirs or self.here.denied is not None:
            return False
        self._read_in_full()
        return self.identity.ways["blake3"] == theirs["blake3"]

    def _read_in_full(self) -> None:
        why = "to know which model it is"
        if self.here.undated is not None:
            why += "; its times are an image's, and may be the next one's as well"
        self.log.line("source.read", f"reading {self.here.directory} once, {why}")
        began = time.monotonic()
        self.identity = read_in_full(self.here, self.identity, self.memory)
        if (seconds := time.monotonic() - began) >= 1:
            self.log.line("source.read", f"read {self.here.directory} in {seconds:.0f} s")
