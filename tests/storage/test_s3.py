"""A real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway import S3
from store_contract import ObjectContract

from entrypoint.store.base import open_store
from entrypoint.store.objects import ObjectStore


@pytest.fixture(autouse=True)
def credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)


class TestOnS3(ObjectContract):
    @pytest.fixture
    def store(self, s3: S3, tmp_path: Path) -> ObjectStore:
        store = open_store(f"s3://{s3.bucket}/{tmp_path.name}/store")
        assert isinstance(store, ObjectStore)
        return store
