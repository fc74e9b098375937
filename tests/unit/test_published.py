from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.errors import ManifestError
from entrypoint.store.published import MAX_BYTES, Published, decode

FILES = "tiny/shardboot-0123456789abcdef"


@given(st.binary(max_size=200))
def test_a_manifest_comes_back_byte_for_byte(manifest: bytes) -> None:
    published = Published(FILES, manifest)
    assert decode(published.encode()) == published


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"{}\n{}",
        b"not json\n{}",
        b"[" * 900 + b"\n{}",
        b'["files"]\n{}',
        b'{"files": 1}\n{}',
        b'{"files": "tiny"}\n{}',
        b'{"files": "tiny/x"}\n{}',
        b'{"files": "../shardboot-0123456789abcdef"}\n{}',
        b'{"files": "a/b/shardboot-0123456789abcdef"}\n{}',
        b'{"files": "/shardboot-0123456789abcdef"}\n{}',
        b'{"files": ".published/shardboot-0123456789abcdef"}\n{}',
        b'{"files": "tiny/shardboot-0123456789ABCDEF"}\n{}',
        b'{"files": "tiny/shardboot-0123456789abcdef", "more": 1}\n{}',
        b'{"files": "' + b"x" * 2000 + b'"}\n{}',
        b"\xff\xfe\n{}",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)


@given(st.binary(max_size=100))
def test_any_bytes_are_an_answer_or_a_refusal(data: bytes) -> None:
    try:
        assert decode(data).encode().endswith(data.partition(b"\n")[2])
    except ManifestError:
        return


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ManifestError):
        decode(Published(FILES, b"x" * MAX_BYTES).encode())
