"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gateway
import pytest
from hypothesis import settings

# A busy machine is no bug in what is tested; what fails once is to be seen again.
settings.register_profile("shardboot", deadline=None, print_blob=True)
settings.load_profile("shardboot")

DISKS = "tests/storage/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, have one worker run all that waits for the disk."""
    from xdist.scheduler import LoadFileScheduling

    scheduler: Any = LoadFileScheduling(config, log)
    file_of = scheduler._split_scope
    scheduler._split_scope = lambda test: DISKS if test.startswith(DISKS) else file_of(test)
    return scheduler if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.S3]:
    """A real S3 server; tests that need one are skipped where it cannot run."""
    with gateway.running(tmp_path_factory.mktemp("s3")) as running:
        yield running
