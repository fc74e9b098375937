"""The key: all that decides whether a checkpoint fits.

A field is in the key only if it changes the logical names, shapes, dtypes or values of a rank's
parameters. Two ways to lay out the same model never share a key digest.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Mapping
from typing import NamedTuple, Self, cast

from entrypoint.checkpoint.digest import Json, digest_json
from entrypoint.errors import ManifestError

FORMAT = 2
"""Our own save and load rules; raised when what a save writes, or a load expects, changes."""


class Key(NamedTuple):
    """What a checkpoint was, or must be, made for.

    `model` is the identity digest of the source; "" while it is not known yet. All other fields
    are vLLM's own resolved answers.
    """

    model: str
    architecture: str
    runner: str
    tp: int
    pp: int
    dp: int
    ep: bool
    cp: int
    eplb: bool
    redundant_experts: int
    expert_placement: str
    dtype: str
    quantization: str | None
    quantization_config: str
    kv_cache_dtype: str
    hf_overrides: str
    model_impl: str
    speculative: str
    multimodal: str
    backends: Mapping[str, str]
    engine: str
    vllm: str
    format: int
    platform: str

    def to_json(self) -> dict[str, Json]:
        """Return all fields by name, as the manifest holds them."""
        return {**self._asdict(), "backends": dict(self.backends)}

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON of all fields, 64 hex digits."""
        return digest_json(self.to_json())

    def family(self, model: str) -> str:
        """Return what successive releases of one deployment share: the digest of name and layout.

        All of the key but what a new release changes: the model's content, vLLM, and our format.
        """
        return digest_json([model, self.to_json() | {"model": "", "vllm": "", "format": 0}])

    def subject(self, model: str) -> str:
        """Return a short name for what is wanted: hex digits, by words, not by a model's bytes."""
        return digest_json([self.to_json() | {"model": ""}, model])[:16]

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read a key from foreign data. Raises: ManifestError naming the field."""
        if not isinstance(value, dict):
            msg = f"key: expected an object, found {type(value).__name__}"
            raise ManifestError(msg)
        for name in sorted(value.keys() ^ set(cls._fields)):
            what = "unknown" if name in value else "missing"
            msg = f"key.{name}: {what} field"
            raise ManifestError(msg, hint="the checkpoint was made by another shardboot version")
        for name, found in value.items():
            if not _well_typed(name, found):
                msg = f"key.{name}: unexpected value {str(found)[:80]!r}"
                raise ManifestError(msg)
        return cls(**cast("dict[str, object]", value))  # type: ignore[arg-type]


_COUNTS = {"tp", "pp", "dp", "cp", "redundant_experts", "format"}
_SWITCHES = {"ep", "eplb"}
_TEXT_BYTES = 4096
_MAX_COUNT = 1_000_000


def _well_typed(name: str, value: Json) -> bool:
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
    if name in _SWITCHES:
        return isinstance(value, bool)
    if name == "backends":
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    if name == "quantization" and value is None:
        return True
    return isinstance(value, str) and len(value) <= _TEXT_BYTES


class Difference(NamedTuple):
    """One key field in which a candidate is not what is wanted."""

    field: str
    wanted: Json
    found: Json

    def to_json(self) -> dict[str, Json]:
        """Return the difference as `plan --format json` prints it."""
        return {"field": self.field, "wanted": self.wanted, "found": self.found}


def differences(wanted: Key, found: Key) -> tuple[Difference, ...]:
    """Return every field but `model` that differs, in the order of the key.

    The model identity is compared by `checkpoint.inspect`, lazily, since it may have to be read.
    """
    left, right = wanted.to_json(), found.to_json()
    return tuple(
        Difference(name, left[name], right[name])
        for name in left
        if name != "model" and left[name] != right[name]
    )
