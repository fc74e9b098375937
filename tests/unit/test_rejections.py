"""What boots reject, for whom, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.state import rejections
from entrypoint.state.rejections import Rejection, Rejections


@pytest.mark.parametrize(
    ("kind", "lasts"),
    [
        *(("unproven", False), ("unfit", False), ("save.online-quant", False)),
        *(("quarantined", True), ("operator", True)),
    ],
)
def test_what_shardboot_found_counts_until_another_version_may_find_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lasts: bool
) -> None:
    book = Rejections(tmp_path)
    assert book.add("d", kind, "why")
    assert book.find("d") == Rejection(kind, "why")
    monkeypatch.setattr(rejections, "__version__", "9.9.9")
    assert (book.find("d") is not None) is lasts


def test_what_is_rejected_for_some_words_is_so_for_these_alone(tmp_path: Path) -> None:
    book = Rejections(tmp_path)
    for asked in ("words", "other words"):
        assert book.add("d", "unfit", "why", asked)
    assert [book.find("d", asked) is None for asked in ("words", "other words", "third")] == [
        *(False, False, True)
    ]
    # Nobody's words: who looks after the store.
    assert book.find("d") == Rejection("unfit", "why")
    assert book.add("d", "operator", "bad")
    assert book.add("d", "unfit", "why", "words")
    assert book.find("d", "third") == Rejection("operator", "bad")


def test_what_has_lapsed_is_not_found_anew_by_what_another_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Rejections(tmp_path)
    assert book.add("d", "unfit", "why", "words")
    monkeypatch.setattr(rejections, "__version__", "9.9.9")
    assert book.add("d", "unfit", "why", "other words")
    assert [book.find("d", asked) is None for asked in ("words", "other words")] == [True, False]


def test_one_that_is_found_again_and_again_pushes_no_other_out(tmp_path: Path) -> None:
    book = Rejections(tmp_path)
    assert book.add("d", "unfit", "why", "words")
    for _ in range(rejections.MAX_ASKED + 1):
        assert book.add("d", "unfit", "why", "other words")
    assert book.find("d", "words") is not None


def test_what_vllm_has_loaded_is_no_worse_for_not_fitting_other_words(tmp_path: Path) -> None:
    book = Rejections(tmp_path)
    assert book.flaw("d", is_loaded=True) is None
    assert book.add("d", "unfit", "why", "words")
    assert book.flaw("d", is_loaded=True) is None
    assert book.flaw("d", is_loaded=False) == Rejection("unfit", "why")
    assert book.add("d", "quarantined", "it kills")
    assert book.flaw("d", is_loaded=True) == Rejection("quarantined", "it kills")


def test_a_rejection_that_cannot_be_read_counts(tmp_path: Path) -> None:
    book = Rejections(tmp_path)
    assert book.add("d", "operator", "why")
    (tmp_path / "rejections" / "d.json").write_bytes(b"\xff")
    found = book.find("d")
    assert found is not None
    assert "cannot be read" in found.reason
    assert book.find("e") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_directory_that_may_not_be_searched_rejects_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert Rejections(tmp_path / "state").add("d", "operator", "why")
    os.seteuid(2000)
    try:
        found = [Rejections(tmp_path / "state").find(digest) for digest in "de"]
    finally:
        os.seteuid(0)
    assert found == [None, None]


def test_what_root_rejects_is_read_by_the_service_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert Rejections(tmp_path).add("d", "operator", "why")
    finally:
        os.umask(before)
    assert (tmp_path / "rejections").stat().st_mode & 0o777 == 0o755


def test_a_link_in_the_place_of_their_directory_is_not_opened_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)

    def exchange(path: Path, **_: object) -> None:
        path.symlink_to(precious)

    monkeypatch.setattr(Path, "mkdir", exchange)
    assert not Rejections(tmp_path).add("d", "operator", "why")
    assert precious.stat().st_mode & 0o777 == 0o700
