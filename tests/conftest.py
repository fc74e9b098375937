"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no bug in what is tested.
settings.register_profile("shardboot", deadline=None)
settings.load_profile("shardboot")
