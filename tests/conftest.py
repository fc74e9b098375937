"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import gateway
import pytest
from hypothesis import settings

# A busy machine is no bug in what is tested; what fails once is to be seen again.
settings.register_profile("shardboot", deadline=None, print_blob=True)
settings.load_profile("shardboot")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.S3]:
    """A real S3 server; tests that need one are skipped where it cannot run."""
    with gateway.running(tmp_path_factory.mktemp("s3")) as running:
        yield running
