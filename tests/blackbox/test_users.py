"""As root with `--user`: who owns what, who vLLM is, and that root is gone. Needs root."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import House, snapshot
from blackbox.openhouse import SERVICE, open_house
from serving import free_port

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def house(everybodys_python: str) -> Iterator[House]:
    with open_house(everybodys_python) as made:
        yield made


@pytest.mark.parametrize(
    ("user", "uid", "gid", "home", "name"),
    [
        ("2000", 2000, 2000, "/", "2000"),
        ("2000:3000", 2000, 3000, "/", "2000"),
        ("nobody", NOBODY.pw_uid, NOBODY.pw_gid, NOBODY.pw_dir, "nobody"),
        ("nobody:daemon", NOBODY.pw_uid, 1, NOBODY.pw_dir, "nobody"),
        (f"{NOBODY.pw_uid}", NOBODY.pw_uid, NOBODY.pw_gid, NOBODY.pw_dir, "nobody"),
        ("nobody:3000", NOBODY.pw_uid, 3000, NOBODY.pw_dir, "nobody"),
    ],
)
def test_vllm_runs_as_the_service_user_and_nobody_else(
    house: House, user: str, uid: int, gid: int, home: str, name: str
) -> None:
    house.rules(serve={"regain": True})
    boot = house.run("serve", "--user", user, house.model, "-tp", 2)
    assert boot.status == 0, boot.stderr
    assert boot.events[-1] == "local.hit"
    assert boot.vllm["uids"] == [uid] * 3
    assert boot.vllm["gids"] == [gid] * 3
    assert boot.vllm["groups"] == [gid]
    assert boot.vllm["regained"] is False
    environ = boot.vllm["environ"]
    assert (environ["HOME"], environ["USER"], environ["LOGNAME"]) == (home, name, name)
    assert boot.vllm["pid"] == boot.pid
    # Nothing of the model or of vLLM ran as root before either.
    assert house.callers == {"resolve": uid, "save": uid, "serve": uid}


def test_supplementary_groups_are_the_users_own(house: House) -> None:
    member = next(
        (p for p in pwd.getpwall() if len(os.getgrouplist(p.pw_name, p.pw_gid)) > 1), None
    )
    if member is None or member.pw_uid == 0:
        pytest.skip("no user of this system is in two groups")
    boot = house.run("serve", "--user", member.pw_name, house.model, "-tp", 2)
    assert sorted(boot.vllm["groups"]) == sorted(os.getgrouplist(member.pw_name, member.pw_gid))


@pytest.mark.parametrize(
    "user",
    ["no-such-user", "no-such-user:2000", "nobody:no-such-group", "-1", "4294967295", "٣", ":5"],
)
def test_an_unknown_user_is_exit_61_and_nothing_starts(house: House, user: str) -> None:
    boot = house.run("serve", f"--user={user}", house.model, "-tp", 2)
    assert (boot.status, boot.vllm, house.calls) == (61, {}, [])
    assert not house.local.exists()


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_owner_and_modes_are_what_is_set_whatever_the_umask(house: House, umask: int) -> None:
    before = os.umask(umask)
    try:
        process = house.start("serve", "--user", "2000:3000", house.model, "-tp", 2)
    finally:
        os.umask(before)
    boot = house.finish(process)
    assert boot.events[-1] == "local.hit", boot.stderr
    checkpoint = Path(boot.words[0])
    for path in [house.local, checkpoint, *checkpoint.rglob("*")]:
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (2000, 3000), path
        wanted = 0o2750 if path.is_dir() else 0o640
        assert stat.S_IMODE(status.st_mode) == wanted, path
    assert house.state.stat().st_uid == 2000
    foreign = [path for path in house.state.rglob("*") if path.lstat().st_uid != 2000]
    assert foreign == []
    made = [*house.local.rglob("*"), *house.state.rglob("*"), house.state]
    assert [path for path in made if path.lstat().st_mode & 0o002] == []
    assert boot.vllm["umask"] == umask


def test_a_hub_cache_in_roots_home_stays_where_it_is(house: House) -> None:
    home = house.root / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert boot.vllm["environ"]["HF_HOME"] == str(home / ".cache" / "huggingface")
    given = house.run("serve", "--user", "2000", house.model, "-tp", 2, HF_HOME="/hub")
    assert given.vllm["environ"]["HF_HOME"] == "/hub"


@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_hub_cache_behind_a_home_that_only_root_may_pass_stops_no_boot(
    house: House, switch: str
) -> None:
    # `-v ~/.cache/huggingface:/root/.cache/huggingface`, as vLLM's own image is run.
    home = house.root / "home"
    (home / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    home.chmod(0o700)
    boot = house.run("serve", "--user", "2000", "org/model", "-tp", 2, SHARDBOOT=switch)
    assert boot.words == ["org/model", "-tp", "2"]
    assert boot.vllm["environ"].get("HF_HOME") != str(home / ".cache" / "huggingface")
    if switch == "on":
        assert f"user.hub: {home}/.cache/huggingface: uid 2000 may not enter {home}" in boot.stderr
        assert boot.events[-1] == "source.absent"


def test_without_a_user_root_stays_root_and_says_so_once(house: House) -> None:
    boot = house.serve()
    assert boot.vllm["uids"] == [0, 0, 0]
    assert boot.events.count("user.root") == 1


def test_not_root_it_stays_who_it_is_and_says_so_once(house: House) -> None:
    house.local.mkdir()
    house.state.mkdir()
    for directory in (house.local, house.state):
        os.chown(directory, SERVICE, SERVICE)
    prefix = ("setpriv", f"--reuid={SERVICE}", f"--regid={SERVICE}", "--clear-groups")
    process = house.start("serve", "--user", "3000", house.model, "-tp", 2, prefix=prefix)
    boot = house.finish(process)
    assert boot.events.count("user.kept") == 1
    assert boot.vllm["uids"] == [SERVICE] * 3
    assert boot.events[-1] == "local.hit"
    same = house.start("serve", "--user", str(SERVICE), house.model, "-tp", 2, prefix=prefix)
    assert "user.kept" not in house.finish(same).events


@pytest.mark.parametrize(
    "closed",
    [
        "model/model.safetensors",
        "model/config.json",
        "model",
        "above",
    ],
)
def test_a_source_that_the_user_may_not_read_is_exit_60_with_a_hint(
    house: House, closed: str
) -> None:
    if closed == "above":
        (house.root / "above").mkdir()
        house.model = house.model.rename(house.root / "above" / "model")
    (house.root / closed).chmod(0o600)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert (boot.status, boot.vllm) == (60, {})
    assert str(house.model) in boot.stderr
    assert "hint: " in boot.stderr


def test_root_touches_nothing_but_the_two_directories_themselves(house: House) -> None:
    theirs = house.local / "theirs"
    (theirs / "deep").mkdir(parents=True)
    (house.local / ".staging").mkdir(mode=0o777)
    (house.local / ".staging").chmod(0o777)
    (theirs / "deep" / "file").write_text("x")
    (house.local / "link").symlink_to("/etc")
    os.chown(house.local, SERVICE, SERVICE)
    os.chown(theirs, 4242, 4242)
    before = snapshot(theirs), snapshot(house.model), held(Path("/etc"))
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert boot.events[-1] == "local.hit", boot.stderr
    assert (snapshot(theirs), snapshot(house.model), held(Path("/etc"))) == before


@pytest.mark.parametrize("user", ["2000", ""])
def test_links_that_others_have_planted_in_a_shared_directory_lead_root_nowhere(
    house: House, user: str
) -> None:
    precious = house.root / "precious"
    precious.mkdir()
    for number in range(40):
        (precious / f"{number}.json").write_text("precious")
    (precious / "ledger").write_text("precious")
    words = ("serve", "--user", user, house.model, "-tp", 2)
    shared = house.root / "shared"
    shared.chmod(0o1777)
    local, state = shared / "local", shared / "state"
    for directory in (local, state):
        directory.mkdir()
        os.chown(directory, 4242, 4242)
    for name in (".staging", ".trash", ".pins"):
        (local / name).symlink_to(precious)
    for name in ("status", "stops", "memory", "rejections", "logs", "imports", "awaited"):
        (state / name).symlink_to(precious)
    (state / "ledger.jsonl").hardlink_to(precious / "ledger")
    before = snapshot(precious)
    places = {"SHARDBOOT_LOCAL_DIR": local, "SHARDBOOT_STATE_DIR": state}
    boot = house.run(*words, **places)
    if user:
        assert boot.vllm["uids"] == [2000] * 3
        assert boot.words == [str(house.model), "-tp", "2"]
        assert f"{local}: root touches nothing there: uid 4242 has made it" in boot.stderr
    else:
        assert (boot.status, boot.vllm) == (60, {})
        assert f"{local}/.staging: expected a directory, found a link" in boot.stderr
        # Nor does it where root itself looks after a store.
        assert house.run("gc", **places).status == 60
    assert snapshot(precious) == before
    assert {path.stat().st_uid for path in (local, state)} == {4242}


def test_root_appends_to_no_file_that_has_another_name(house: House) -> None:
    precious = house.root / "precious"
    precious.write_text("precious")
    house.state.mkdir()
    (house.state / "ledger.jsonl").hardlink_to(precious)
    house.local.mkdir()
    boot = house.serve()
    assert "state.unwritable" in boot.events
    assert precious.read_text() == "precious"


def test_who_else_could_put_weights_there_is_said_once(house: House) -> None:
    above = house.root / "above"
    above.mkdir()
    above.chmod(0o777)
    places = {"SHARDBOOT_LOCAL_DIR": above / "local", "SHARDBOOT_STATE_DIR": above / "state"}
    for _ in range(2):
        boot = house.run("serve", "--user", "2000", house.model, "-tp", 2, **places)
        assert boot.events[-1] == "local.hit", boot.stderr
        text = f"{above}: others could exchange what lies there: everybody may write in it"
        assert boot.stderr.count(f"user.directory: {text}") == 1
    assert (above / "local").stat().st_uid == 2000


def test_a_user_without_a_home_has_its_caches_in_the_state_directory(house: House) -> None:
    for _ in range(2):
        boot = house.run("serve", "--user", "2000", house.model, "-tp", 2, VLLM_CACHE_ROOT="/mine")
        assert boot.events[-1] == "local.hit", boot.stderr
        environ = boot.vllm["environ"]
        kept = f"{house.state}/home/.cache"
        assert environ["XDG_CACHE_HOME"] == kept
        assert environ["HF_HOME"] == f"{kept}/huggingface"
        assert environ["TRITON_CACHE_DIR"] == f"{kept}/triton"
        assert environ["TORCHINDUCTOR_CACHE_DIR"] == f"{kept}/torchinductor"
        assert environ["VLLM_CACHE_ROOT"] == "/mine"
    assert (house.state / "home").stat().st_uid == 2000


def test_what_one_user_could_open_is_opened_again_by_another(house: House) -> None:
    words = ("serve", house.model, "-tp", 2)
    house.run("serve", "--user", "2000", *words[1:])
    checkpoint = Path(house.run("serve", "--user", "2000", *words[1:]).words[0])
    shard = next(checkpoint.glob("*.safetensors"))
    for path in [house.state, *house.state.rglob("*"), house.local, *house.local.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    shard.chmod(0o600)
    assert house.run("serve", "--user", "2000", *words[1:]).events[-1] == "local.hit"
    boot = house.run("serve", "--user", "3000", "--on-miss", "source", *words[1:])
    assert "local.unreachable" in boot.events, boot.stderr
    assert f"Permission denied: '{shard}'" in boot.stderr
    assert boot.vllm["uids"] == [3000] * 3


def test_weights_that_the_user_may_not_read_are_an_error_of_ownership(house: House) -> None:
    weights = next(house.model.glob("*.safetensors"))
    weights.chmod(0o600)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert (boot.status, boot.vllm) == (60, {})
    assert f"{weights}: uid 2000 may not read the model" in boot.stderr


@pytest.mark.parametrize("name", ["notes.txt", "figures/plot.json", "extra/old.safetensors"])
def test_what_vllm_may_never_open_ends_no_boot(house: House, name: str) -> None:
    path = house.model / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    path.chmod(0o600)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert boot.words == [str(house.model), "-tp", "2"]
    assert boot.events[-1] == "source.broken"
    assert f"{path}: uid 2000 may not read it" in boot.stderr
    # Where it could be read once, and stays as it was, it is known.
    assert house.serve().events[-1] == "local.hit"


def test_weights_are_opened_only_where_they_may_have_to_be_read(house: House) -> None:
    weights = next(house.model.glob("*.safetensors"))
    weights.chmod(0o600)
    checkpoint = Path(house.serve().words[0])
    for path in [house.state, *house.state.rglob("*"), house.local, *house.local.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert "local.hit" in boot.events, boot.stderr
    shutil.rmtree(checkpoint)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert (boot.status, boot.vllm) == (60, {})
    assert f"{weights}: uid 2000 may not read the model" in boot.stderr


def test_who_only_looks_becomes_whom_the_boot_belonged_to(house: House) -> None:
    house.run("serve", "--user", "3000", house.model, "-tp", 2)
    seen = house.run("status", "--format", "json", SHARDBOOT_USER="2000")
    assert seen.status == 0, seen.stderr
    assert "3000" not in seen.stderr
    assert house.model.name in seen.stdout
    assert house.state.stat().st_uid == 3000


@pytest.mark.parametrize("word", ["--dir-mode", "--file-mode"])
def test_no_mode_lets_everybody_write(house: House, word: str) -> None:
    boot = house.run("serve", "--user", "2000", word, "0777", house.model, "-tp", 2)
    assert (boot.status, boot.vllm) == (10, {})
    (line, hint) = boot.stderr.splitlines()
    assert "0777 lets everybody write" in line
    assert "2750" in hint
    assert not house.local.exists()


def held(path: Path) -> tuple[int, int, int]:
    """Return whose it is, and its mode: others may work in it meanwhile."""
    status = path.stat()
    return status.st_uid, status.st_gid, status.st_mode


def test_a_directory_full_of_other_things_is_not_given_away(house: House) -> None:
    (house.local / "precious").mkdir(parents=True)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert boot.events[-1] == "local.unwritable"
    assert f"{house.local}: stays with uid 0, since it is not empty" in boot.stderr
    assert house.local.stat().st_uid == 0


def test_a_rejection_by_root_is_seen_by_the_service_user(house: House) -> None:
    words = ("serve", "--user", "2000", house.model, "-tp", 2)
    house.run(*words)
    [checkpoint] = [path.parent for path in house.local.glob("*/manifest.json")]
    assert house.run("reject", checkpoint.name).status == 0
    assert house.run(*words).events[-1] == "local.operator"


def test_switched_off_it_still_drops_root(house: House) -> None:
    boot = house.run("serve", house.model, "-tp", 2, SHARDBOOT="off", SHARDBOOT_USER="2000")
    assert boot.vllm["uids"] == [2000, 2000, 2000]


def test_switched_off_that_user_has_the_caches_that_a_boot_gave_it(house: House) -> None:
    words = ("serve", "--user", "2000", house.model, "-tp", 2)
    off = house.run(*words, SHARDBOOT="off")
    assert "XDG_CACHE_HOME" not in off.vllm["environ"]
    assert not house.state.exists()
    before = house.run(*words).vllm["environ"]
    off = house.run(*words, SHARDBOOT="off")
    kept = {name: word for name, word in before.items() if f"{house.state}/home" in word}
    assert kept.keys() == {"XDG_CACHE_HOME", "HF_HOME"}
    assert {name: off.vllm["environ"].get(name) for name in kept} == kept


def test_switched_off_it_drops_root_where_only_the_file_names_a_user(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text("user = 2000\n")
    words = ("serve", house.model, "-tp", 2)
    boot = house.run(*words, SHARDBOOT="off", SHARDBOOT_CONFIG_FILE=config)
    assert boot.vllm["uids"] == [2000, 2000, 2000]


def test_a_store_that_is_a_link_is_not_given_away(house: House) -> None:
    precious = house.root / "precious"
    precious.mkdir()
    house.local.symlink_to(precious)
    boot = house.run("serve", "--user", "2000", house.model, "-tp", 2)
    assert boot.status == 60
    assert precious.stat().st_uid == 0


def test_whoever_asks_first_leaves_the_status_to_the_service_user(house: House) -> None:
    port = free_port()
    house.rules(serve={"answers": 200})
    process = house.start("serve", "--user", SERVICE, house.model, "-tp", 2, "--port", port)
    house.wait_for("listening", 60)
    (path,) = (house.state / "status").iterdir()
    assert path.stat().st_uid == SERVICE
    for more in ({}, {"SHARDBOOT_USER": SERVICE}):  # root, who marks it as healthy; then the user
        asked = house.run("health", **more)
        assert (asked.status, asked.stderr) == (0, "")
    assert [entry["event"] for entry in house.ledger].count("healthy") == 1
    house.finish(process)
    assert house.run("health", SHARDBOOT_USER=SERVICE).stdout.startswith("stopped: ")
