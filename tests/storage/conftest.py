from __future__ import annotations

from collections.abc import Iterator

import gateway
import pytest


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.S3]:
    with gateway.running(tmp_path_factory.mktemp("s3")) as running:
        yield running
