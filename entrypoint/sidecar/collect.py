"""What the sidecar takes away here, by the code of `shardboot gc`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from entrypoint.caches.collect import collect as collect_caches
from entrypoint.keep import rules_for
from entrypoint.log import human_bytes
from entrypoint.obstacles import unwritable
from entrypoint.sidecar.node import Node
from entrypoint.store.collect import collect as collect_checkpoints


def collect(node: Node) -> Iterator[float]:
    """Collect as `shardboot gc` does, where this user may. Raises: StoreError."""
    yield from ()
    settings = node.settings
    if not os.path.isdir(settings.local_dir) or unwritable(settings) is not None:
        return
    state, rules = settings.state_dir, rules_for(settings, shared=False)
    checkpoints = collect_checkpoints(node.local, state, rules, dry_run=False).verdicts
    caches = collect_caches(
        state, settings.local_dir, settings.grace, settings.cache_bytes, dry_run=False
    )
    for gone in (verdict for verdict in (*checkpoints, *caches) if verdict.is_collected):
        text = f"{gone.name}: {human_bytes(gone.size)}; {gone.reason}: {gone.text}"
        node.log.line("collect.gone", text)
        node.metrics.collected_bytes.inc(gone.size)
    if count := sum(verdict.is_collected for verdict in checkpoints):
        node.metrics.collected.inc(count)
        node.look()
