from __future__ import annotations

from collections.abc import Iterator

import pytest
from juicefs import Nodes, mounted


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with mounted(tmp_path_factory.mktemp("juicefs")) as found:
        yield found
