"""Boots whose shared store is a bucket on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import Boot, House
from faults import SECRET, Proxy, proxy, times
from gateway import S3

HIDDEN = "not-to-be-seen"


@pytest.fixture
def far(house: House, s3: S3, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy to the server; the house's shared store is behind it."""
    with proxy(s3) as server:
        house.environ |= s3.environ(server.server_port)
        house.environ["SHARDBOOT_SHARED"] = f"s3://{s3.bucket}/{tmp_path.name}"
        yield server


def here(house: House) -> str:
    return house.environ["SHARDBOOT_SHARED"]


def forget(house: House) -> None:
    """Become another node: nothing is in the local store."""
    house.local.rename(house.root / "local-before")


def everything_said(house: House, *boots: Boot) -> str:
    kept = [path.read_text(errors="replace") for path in house.state.rglob("*") if path.is_file()]
    return "\n".join([*kept, *(boot.stdout + boot.stderr for boot in boots)])


def test_one_node_publishes_and_another_serves_the_very_checkpoint(
    house: House, far: Proxy
) -> None:
    first = house.serve(SHARDBOOT_PUBLISH="yes")
    assert first.events[-3:] == ["save.done", "push.done", "local.hit"]
    (name,) = house.store.names()
    forget(house)
    decided = house.plan()
    assert (decided["action"], decided["checkpoint"]["path"]) == ("copy", f"{here(house)}/{name}")
    second = house.serve()
    assert second.events[-3:] == ["shared.hit", "copy.done", "local.hit"]
    assert second.lasting_words == first.lasting_words
    assert house.calls.count("save") == 1
    far.requests.clear()
    third = house.serve()
    assert third.events[-1] == "local.hit"
    # A hit asks nobody.
    assert far.requests == []
    assert HIDDEN not in everything_said(house, first, second, third)


def test_commands_look_after_a_bucket(house: House, far: Proxy) -> None:
    house.serve(SHARDBOOT_PUBLISH="yes")
    (name,) = house.store.names()
    listed = house.run("list", "--shared", "--format", "json").json
    assert [row["name"] for row in listed] == [name]
    assert house.run("show", "--shared", "--format", "json", name).json["path"].startswith("s3://")
    for words in ([], ["--deep"]):
        looked = house.run("verify", "--shared", "--format", "json", *words).json
        assert looked == [{"name": name, "discrepancies": []}]
    pushed = house.run("push", "--format", "json", house.model, "-tp", 2).json
    assert pushed == {"checkpoint": {"name": name}}
    secret = house.root / "secret"
    secret.write_text(f"{house.environ.pop('AWS_SECRET_ACCESS_KEY')}\n")
    kept = {"SHARDBOOT_AWS_SECRET_ACCESS_KEY_FILE": str(secret)}
    assert house.run("list", "--shared", "--format", "json", **kept).json == listed
    house.environ |= kept
    swept = house.run("gc", "--shared", "--format", "json").json
    assert (swept["checkpoints"], swept["staging"]) == ([], [])
    refused = house.run("pin", "--shared", name)
    assert refused.status == 10
    assert "nothing is pinned in object stores" in refused.stderr


def test_a_bucket_that_never_answers_costs_seconds_and_no_checkpoint(
    house: House, far: Proxy
) -> None:
    far.fails = times(10**6, "hang", "")
    boot = house.serve()
    assert boot.events[-2:] == ["save.done", "local.hit"]
    assert f"{here(house)}: no answer in time" in boot.stderr
    assert boot.seconds < 40


def test_credentials_that_expire_during_a_copy_lead_to_the_next_choice(
    house: House, far: Proxy
) -> None:
    house.serve(SHARDBOOT_PUBLISH="yes")
    forget(house)
    far.fails = times(10**6, "expired", "model-rank-1")
    boot = house.serve()
    assert boot.events[-2:] == ["save.done", "local.hit"]
    assert "store.unreachable" in boot.events
    assert "ExpiredToken" in boot.stderr
    assert SECRET not in everything_said(house, boot)


def test_credentials_in_the_url_are_refused_and_not_repeated(house: House) -> None:
    boot = house.serve(SHARDBOOT_SHARED="s3://AKIAUSER:HUSHHUSH@bucket/x")
    assert boot.status == 10
    assert "holds credentials" in boot.stderr
    assert "HUSH" not in everything_said(house, boot)
