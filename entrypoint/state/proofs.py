"""Proofs made here of checkpoints that came without one: a file each, by the manifest's content.

A file may be torn, or put there by anybody, and what it holds may go to other nodes, in a manifest.
So it counts only as `checkpoint.proof` makes it, for the very content that it says it is for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.fields import a_count, a_digest, a_text, an_object, exactly, refuse
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ManifestError
from entrypoint.state.files import read_json, write_json
from entrypoint.state.places import below

MAX_ITEMS = 1 << 32


class Proofs:
    """All proofs under `root`; what a save proved stands in its manifest instead."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, manifest: Manifest) -> Mapping[str, Json] | None:
        """Return the proof of a manifest's content; None where there is none that counts."""
        try:
            return self.read(manifest)
        except ManifestError:
            return None

    def read(self, manifest: Manifest) -> Mapping[str, Json] | None:
        """Return the proof of a manifest's content; None where there is none.

        Raises: ManifestError saying why the one that is there does not count.
        """
        path = self._path(manifest)
        kept = read_json(path)
        # False where the directory may not be searched.
        if kept is None and not os.path.exists(path):
            return None
        return _checked(kept, manifest)

    def add(self, manifest: Manifest, proof: Mapping[str, Json]) -> None:
        """Keep a proof; durable when this returns. Raises: OSError."""
        path = self._path(manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"content": manifest.content, "proof": dict(proof)}, 0o644)

    def _path(self, manifest: Manifest) -> Path:
        return below(self.root, "proofs") / f"{manifest.content}.json"


def _checked(kept: Json, manifest: Manifest) -> Mapping[str, Json]:
    document = an_object(kept, "kept")
    exactly(document, "kept", {"content", "proof"})
    if document["content"] != manifest.content:
        refuse("kept.content", manifest.content, document["content"])
    proof = an_object(document["proof"], "proof")
    names = {"items", "unprobed", "controlled", "evidence", "vllm", "plugin"}
    exactly(proof, "proof", names | ({"in_place"} & proof.keys()))
    a_count(proof["items"], "proof.items", MAX_ITEMS)
    unprobed = proof["unprobed"]
    if not isinstance(unprobed, list):
        refuse("proof.unprobed", "a list of names", unprobed)
    for name in unprobed:
        a_text(name, "proof.unprobed")
    for field in ("controlled", "in_place"):
        if not isinstance(proof.get(field, False), bool):
            refuse(f"proof.{field}", "true or false", proof[field])
    a_digest(proof["evidence"], "proof.evidence")
    if proof["vllm"] != manifest.key.vllm:
        refuse("proof.vllm", manifest.key.vllm, proof["vllm"])
    a_text(proof["plugin"], "proof.plugin")
    return proof
