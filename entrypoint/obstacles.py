"""What stands in the way of any checkpoint, of a copy, of a save. Looks at what was found out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from entrypoint import __version__
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.config import Settings
from entrypoint.engine.resolution import Resolution
from entrypoint.model.identity import Identity, key_by_config
from entrypoint.model.source import SourceView
from entrypoint.plan import Obstacle
from entrypoint.state import process, stops
from entrypoint.state.attempts import tees_died
from entrypoint.state.ledger import Ledger
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections, on_the_way
from entrypoint.state.tries import Tries

OWN_LOADERS = ("auto", "hf", "safetensors")
"""Load formats that mean "load the source as it is"; any other, and users know better."""

REDIRECTING = ("VLLM_MODEL_REDIRECT_PATH", "VLLM_USE_MODELSCOPE")
"""With these vLLM loads something else than the word that names the model."""


def proof_needed(settings: Settings, resolution: Resolution) -> str:
    """Return why a checkpoint must be proved before it is served, or ""."""
    match settings.prove:
        case "always":
            return "--prove always"
        case "never":
            return ""
        case "auto":
            return resolution.unruled


def unproved(settings: Settings, resolution: Resolution, manifest: Manifest) -> str:
    """Return why a manifest must be proved, where it is not yet; "" where nothing is to be proved.

    Over several nodes only the manifest's own proof counts: all of them have to decide alike.
    """
    needed = proof_needed(settings, resolution)
    if not needed or manifest.proof:
        return ""
    is_proved = resolution.nnodes == 1 and Proofs(settings.state_dir).find(manifest)
    return "" if is_proved else needed


def unservable(resolution: Resolution, source: SourceView) -> Obstacle | None:
    """Return why no checkpoint can be served for these words, whatever the stores hold."""
    return _aside(resolution, source.environ) or _unbuilt(resolution, source)


def _aside(resolution: Resolution, environ: Mapping[str, str]) -> Obstacle | None:
    """Return by which of the user's own words or variables they know better."""
    if resolution.load_format not in OWN_LOADERS or resolution.has_extra_config:
        asked = resolution.load_format if resolution.load_format not in OWN_LOADERS else "extra"
        text = f"the words choose a loader of their own ({asked}); stepping aside"
        return Obstacle("load-format.user", text, is_wish=True)
    for name in REDIRECTING:
        if environ.get(name, "").lower() not in ("", "0", "false"):
            text = f"{name} is set, so the words do not say where the model comes from"
            return Obstacle("source.redirected", text, is_wish=True)
    if resolution.has_own_place:
        text = "--download-dir keeps weights where only vLLM looks for them"
        return Obstacle("source.redirected", text, is_wish=True)
    if resolution.has_other_config:
        text = "--hf-config-path builds another model than the source's own config does"
        return Obstacle("source.other-config", text, is_wish=True)
    return None


def _unbuilt(resolution: Resolution, source: SourceView) -> Obstacle | None:
    """Return what stands in the way of any checkpoint: the engine, the layout, the source."""
    if resolution.plugin is None:
        text = "vLLM's Python has no shardboot installed, so it cannot load checkpoints"
        return Obstacle("engine.noplugin", text)
    if resolution.plugin != __version__:
        text = f"vLLM's Python has shardboot {resolution.plugin}, this is {__version__}"
        return Obstacle("engine.plugin-version", text)
    if resolution.unverified:
        text = f"the words cannot be rewritten safely: {resolution.unverified}"
        return Obstacle("engine.words", text)
    if not resolution.ranks:
        why = resolution.unplaced or "vLLM does not tell which ranks are on which"
        return Obstacle("layout.multinode", f"{resolution.nnodes} nodes: {why}")
    if resolution.key.dp > 1:
        # Dense replicas hold equal state, so their key says dp 1.
        text = f"{resolution.key.dp} replicas share the experts: file names know no replica"
        return Obstacle("layout.dp-moe", text)
    if resolution.draft == "target":
        text = "the draft's weights are read from the source, which a checkpoint does not hold"
        return Obstacle("layout.draft", text)
    if source.here.timed_out and not source.identity.ways:
        return Obstacle("source.hung", f"{source.here.word} does not answer and was never seen")
    return None


def one_of_many(resolution: Resolution) -> Obstacle:
    """Return why a node among several can neither save nor prove: it runs some ranks only."""
    text = (
        f"one of {resolution.nnodes} nodes cannot save or prove a checkpoint: `shardboot save` and "
        "`push` it on one machine, with these words but --nnodes and --node-rank"
    )
    return Obstacle("layout.multinode", text, 50)


def unwritable(settings: Settings) -> Obstacle | None:
    """Return why nothing can be put into the local store, found out before anything slow."""
    places = (settings.local_dir, *settings.local_dir.parents)
    # os.path, since Path.exists raises where a parent may not be searched.
    nearest = next(place for place in places if os.path.lexists(place))
    if os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK):
        return None
    text = f"{nearest}: uid {os.geteuid()} may not write there"
    return Obstacle("local.unwritable", text, 60)


def unsavable(settings: Settings, resolution: Resolution, source: SourceView) -> Obstacle | None:
    """Return why no checkpoint can be saved here."""
    if resolution.nnodes > 1:
        return one_of_many(resolution)
    if source.here.timed_out:
        return Obstacle("source.hung", f"{source.here.word} does not answer", 30)
    if source.here.broken:
        return Obstacle("source.broken", source.here.broken, 30)
    if source.here.denied:
        text = f"{source.here.denied}: uid {os.geteuid()} may not read it, so nobody can tell all"
        return Obstacle("source.broken", f"{text} that the model is", 60)
    if source.here.directory is None:
        text = f"{source.here.word} is not on this machine; it can be saved once vLLM fetched it"
        return Obstacle("source.absent", text, 31)
    if source.here.is_checkpoint:
        return Obstacle("source.checkpoint", "a checkpoint cannot be saved from a checkpoint", 22)
    for place in (settings.local_dir, settings.state_dir):
        if Path(source.here.directory) in place.parents:
            text = f"{place} lies inside the model, which would change with every boot"
            return Obstacle("source.holds-store", text, 10)
    return unwritable(settings) or _unsavable_before(settings, resolution, source.identity)


def unteeable(settings: Settings, resolution: Resolution, identity: Identity) -> Obstacle | None:
    """Return why a checkpoint cannot be saved while the source is served already."""
    if needed := proof_needed(settings, resolution):
        key = on_the_way(key_by_config(resolution.key, identity))
        found = Rejections(settings.state_dir).find(key)
        if found or not resolution.shows_all:
            text = f"{needed}, so it is proved before it is served, and saved before vLLM starts"
            more = f" ({found.reason})" if found else ""
            return Obstacle("tee.proof", text + more)
    if settings.publish:
        return Obstacle("tee.publish", "it is published before it is served: saved at once")
    if settings.on_miss != "tee":
        # Nobody asks: the ledger need not be read for it.
        return None
    family = str(resolution.family["family"])
    told = stops.told(settings.state_dir)
    entries = [*Ledger(settings.state_dir).recent_about(family), *told]
    died = tees_died(entries, family, process.is_alive)
    if died < settings.quarantine_after:
        return None
    text = f"{died} boots in a row died while they saved on the way: saved before vLLM starts"
    return Obstacle("tee.died", text)


def _unsavable_before(
    settings: Settings, resolution: Resolution, identity: Identity
) -> Obstacle | None:
    """Return what earlier saves found that would most likely come out the same again."""
    rejections, by_config = Rejections(settings.state_dir), key_by_config(resolution.key, identity)
    if refused := rejections.find(by_config):
        text = f"as an earlier try found: {refused.reason}"
        return Obstacle(refused.kind, text, 50, is_remembered=True)
    if failed := Tries(settings, by_config).resting(settings.quarantine_after):
        text = f"{failed.in_row} saves in a row failed, the next is tried in a day: {failed.text}"
        return Obstacle(failed.reason, text, failed.exit_code, is_remembered=True)
    key = resolution.key._replace(model=identity.ways.get("blake3", ""))
    earlier = rejections.find(key.digest)
    if earlier is None or not proof_needed(settings, resolution):
        return None
    text = f"an earlier save of this very key failed its proof: {earlier.reason}"
    return Obstacle("save.unproven", text, 51, is_remembered=True)
