"""A directory store on a file system of others, which may hang: whoever looks does not wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.finding import Absent, Complete, Damaged, Unreachable
from entrypoint.checkpoint.inspect import Stamp
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ManifestError, NotFoundError, StoreError
from entrypoint.model.bounded import Alive, while_alive
from entrypoint.state.memory import Memory
from entrypoint.store.directory import DirectoryStore

LOOK_SECONDS: Final = 5.0
"""How long it may take to list one name, or to read one manifest; a busy one takes seconds."""

CHECK_SECONDS: Final = 30.0
"""How long for one file of the checkpoint that fits: its data may be cold, and it is wanted."""

_ERRORS: Final = {each.__name__: each for each in (ManifestError, NotFoundError, StoreError)}


class DistantStore(DirectoryStore):
    """A directory store whose names, manifests and files are looked at in children.

    However many there are, each may take its time; but once one has fallen silent, all looks fail
    at once, as on a store that is not there. So it is for one look, and not to be kept.
    """

    _silent = ""
    """What is said of it, once it has fallen silent."""

    @classmethod
    def of(cls, store: DirectoryStore) -> DistantStore:
        """Return the same store, for one look."""
        return cls(store.root, store.dir_mode, store.file_mode)

    @property
    def is_silent(self) -> bool:
        """Whether a look has had no answer."""
        return bool(self._silent)

    def names(self, alive: Alive | None = None) -> list[str]:  # noqa: ARG002 - it is heard here
        """Return all published names, newest manifest first. Raises: StoreError."""
        look = super().names
        found = self._ask(LOOK_SECONDS, lambda alive: cast("list[Json]", look(alive)))
        return cast("list[str]", found)

    def stamps(self, names: Iterable[str], alive: Alive | None = None) -> list[Stamp | None]:  # noqa: ARG002 - it is heard here
        """Return what tells each one's manifest from another file; None where there is none.

        Raises: StoreError.
        """
        look, names = super().stamps, list(names)
        found = self._ask(LOOK_SECONDS, lambda alive: cast("list[Json]", look(names, alive)))
        stamps = cast("list[list[int] | None]", found)
        return [None if stamp is None else cast("Stamp", tuple(stamp)) for stamp in stamps]

    def read_manifest(self, name: str) -> bytes:
        """Return the bytes of a checkpoint's manifest, unchecked.

        Raises: NotFoundError; StoreError; ManifestError for what cannot be one.
        """
        read = super().read_manifest
        found = self._ask(LOOK_SECONDS, lambda _: read(name).decode("latin-1"))
        return cast("str", found).encode("latin-1")

    def check(
        self,
        manifest: Manifest,
        memory: Memory,
        ranks: Collection[int],
        alive: Alive | None = None,  # noqa: ARG002 - it is heard here
    ) -> Complete | Absent | Damaged | Unreachable:
        """Compare the files with the manifest; `memory` keeps what needs no second reading."""
        check = super().check
        try:
            found = self._ask(
                CHECK_SECONDS, lambda alive: _to_json(check(manifest, memory, ranks, alive))
            )
        except StoreError as error:
            return Unreachable(str(error))
        return _from_json(manifest, cast("list[Json]", found))

    def _ask(self, silence: float, look: Callable[[Alive], Json]) -> Json:
        """Return what `look` returns in a child. Raises: what it raises; StoreError."""

        def answer(alive: Alive) -> Json:
            try:
                return ["", look(alive)]
            except tuple(_ERRORS.values()) as error:
                return [type(error).__name__, str(error)]

        if not self._silent:
            try:
                found = while_alive(silence, answer, at=str(self.root))
            except OSError as error:
                raise StoreError(f"{self.where}: {error.strerror or error}") from None
            if isinstance(found, list):
                kind, value = found
                if kind:
                    raise _ERRORS[str(kind)](str(value))
                return value
            self._silent = f"{self.where} did not answer within {silence:.0f} s"
        raise StoreError(self._silent)


def _to_json(found: Complete | Absent | Damaged | Unreachable) -> Json:
    match found:
        case Complete(path=path, ranks=ranks):
            return ["complete", path, ranks]
        case Absent(why=why):
            return ["absent", why]
        case Damaged(discrepancies=wrong):
            return ["damaged", *wrong]
        case Unreachable(error=error):
            return ["unreachable", error]


def _from_json(manifest: Manifest, found: list[Json]) -> Complete | Absent | Damaged | Unreachable:
    match found:
        case ["complete", path, ranks]:
            return Complete(manifest, str(path), str(ranks))
        case ["absent", why]:
            return Absent(str(why))
        case ["damaged", *wrong]:
            return Damaged(manifest.name, tuple(map(str, wrong)))
        case _:
            return Unreachable(str(found[-1]))
