"""Who vLLM runs as, who owns what then, and what was said: in containers, with a stub for vLLM.

Prints the table that docs/containers.md has under "Users", and fails where a row is not there word
for word. Needs root, podman and debootstrap.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from container.image import ROOT
from container.stub_host import DATA, Outcome, StubHost
from juicefs import mounted

pytestmark = pytest.mark.container

DOCUMENT: Final = (ROOT / "docs" / "containers.md").read_text().splitlines()
OTHER: Final = 4242
STORE: Final = f"{DATA}/checkpoints"
NO_USER: Final = "--env=SHARDBOOT_USER="
OPENSHIFT: Final = ("--user=1000660000:0", "--passwd=false", "--unsetenv=HOME", NO_USER)
READ_ONLY: Final = ("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp")
SOME_IDS: Final = ("--uidmap=0:100000:1000", "--gidmap=0:100000:1000")
AS_2000: Final = ("setpriv", "--reuid=2000", "--regid=2000", "--clear-groups")
FIRST_ID: Final = 100_000
"""What 0 is outside of such a container."""


class Case(NamedTuple):
    """One row: how the container starts, and with what at /var/lib/shardboot.

    `volume` is mode, uid and gid of what is mounted there; None: nothing. `store` is what is
    mounted at checkpoints/ in it, if anything; `first_id` what 0 is outside.
    """

    started: str
    where: str
    words: Sequence[str] = ()
    options: Sequence[str] = ()
    volume: tuple[int, int, int] | None = (0o755, 0, 0)
    store: str = ""
    first_id: int = 0


IMAGES = (0o775, 2000, 0)
CASES: Final = (
    Case("root", "the image's own volume", volume=IMAGES),
    Case("root, `--user vllm`", "a volume of root's", ("--user", "vllm")),
    Case("root, `--user 2000`", "a volume of root's", ("--user", "2000")),
    Case("root, `--user 3000:4000`", "a volume of root's", ("--user", "3000:4000")),
    Case("root, `--user nobody:daemon`", "a volume of root's", ("--user", "nobody:daemon")),
    Case("root, no user named", "a volume of root's", (), (NO_USER,)),
    Case("`docker run --user 2000`", "the image's own volume", (), ("--user=2000",), IMAGES),
    Case("any uid, group 0 (OpenShift)", "the image's own volume", (), OPENSHIFT, IMAGES),
    Case("any uid, group 0 (OpenShift)", "a volume of root's", (), OPENSHIFT),
    Case("root", "read-only root, a volume", (), READ_ONLY),
    Case("root", "read-only root, a tmpfs", (), (*READ_ONLY, f"--tmpfs={DATA}"), None),
    Case("root", "a complete store, read-only", store="complete:ro"),
    Case("root", "a volume of uid 4242's", volume=(0o755, OTHER, OTHER)),
    Case("root", "a store that was root's", store="roots"),
    Case("root", "a store of uid 4242's", store="theirs"),
    Case("root", "other things of uid 4242's", store="things"),
    Case("root", "all may write (emptyDir)", volume=(0o777, 0, 0)),
    Case("root, `--user 3000:5000`", "setgid", ("--user", "3000:5000"), volume=(0o2775, 0, 5000)),
    Case("root, `--user 2000`", "ids 0 to 999 are mapped", ("--user", "2000"), SOME_IDS),
    Case(
        *("root, `--user 500`", "ids 0 to 999 are mapped", ("--user", "500"), SOME_IDS),
        volume=(0o755, FIRST_ID, FIRST_ID),
        first_id=FIRST_ID,
    ),
    Case(
        *("root, `--user 500`", "mapped, but not the volume's", ("--user", "500"), SOME_IDS),
        first_id=FIRST_ID,
    ),
    Case("root", "no CAP_CHOWN", options=("--cap-drop=CHOWN",)),
    Case("root, `--dir-mode 0777`", "a volume of root's", ("--dir-mode", "0777")),
)


@pytest.fixture(scope="module")
def host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubHost]:
    room = tmp_path_factory.mktemp("users")
    yield StubHost(room, image)
    shutil.rmtree(room)


@pytest.fixture(scope="module")
def complete(host: StubHost) -> Path:
    """A store with a checkpoint of uid 2000's."""
    volume = host.volume()
    boot = host.run(mounts=[f"{volume}:{DATA}"])
    assert "local.hit" in boot.reasons, boot.stderr
    return volume / "checkpoints"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.started}: {case.where}")
def test_the_table_in_the_docs_is_what_happens(host: StubHost, complete: Path, case: Case) -> None:
    mounts, store = [], None
    if case.volume is not None:
        volume = host.volume(*case.volume)
        mounts, store = [f"{volume}:{DATA}"], volume / "checkpoints"
    if case.store:
        kind, _, options = case.store.partition(":")
        store = laid_out(host, complete, kind)
        mounts.append(f"{store}:{STORE}:{options or 'rw'}")
    boot = host.run(*case.words, mounts=mounts, options=case.options)
    appears(case.started, case.where, boot, store, case.first_id)


def laid_out(host: StubHost, complete: Path, kind: str) -> Path:
    """Return a store of this kind."""
    if kind == "things":
        made = host.volume(0o755, OTHER, OTHER)
        (made / "thesis.tex").write_text("\\documentclass{book}")
        return made
    made = host.volume()
    subprocess.run(["cp", "-a", f"{complete}/.", made], check=True)
    if kind != "complete":
        uid = OTHER if kind == "theirs" else 0
        subprocess.run(["chown", "-R", f"{uid}:{uid}", made], check=True)
    return made


def test_where_root_is_nobody_the_user_works_by_itself(host: StubHost, tmp_path: Path) -> None:
    with mounted(tmp_path / "squashed", "--root-squash", "65534:65534") as nodes:
        volume = nodes.one / "volume"
        make = [*AS_2000, "mkdir", "--mode=0750", volume.name]
        subprocess.run(make, cwd=nodes.one, check=True)
        boot = host.run(mounts=[f"{volume}:{DATA}"])
        # Even to look, one has to be that user.
        appears("root", "root_squash (JuiceFS)", boot, volume / "checkpoints", 0, AS_2000)


def appears(
    started: str,
    where: str,
    boot: Outcome,
    store: Path | None,
    first_id: int = 0,
    looks_as: Sequence[str] = (),
) -> None:
    """Print the row of the table, and find it in the document."""
    owned = whose(store, first_id, looks_as) if store is not None else ("", "")
    row = f"| {' | '.join((started, where, who(boot), home(boot), *owned, said(boot)))} |"
    print(row)
    assert row in DOCUMENT, boot.stderr


def who(boot: Outcome) -> str:
    if not boot.vllm:
        return f"exit {boot.status}"
    (uid,), (gid,) = set(boot.vllm["uids"]), set(boot.vllm["gids"])
    more = sorted({*boot.vllm["groups"]} - {gid})
    return f"{uid}:{gid}" + "".join(f" +{group}" for group in more)


def home(boot: Outcome) -> str:
    """Return HOME, and where others and vLLM cache; not which checkpoint's caches those are."""
    if not boot.vllm:
        return ""
    environ = boot.vllm["environ"]
    names = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT")
    caches = [environ.get(name, "there").removeprefix(DATA) for name in names]
    return ", ".join([environ["HOME"], *(re.sub("(/caches)/.*", r"\1", path) for path in caches)])


def whose(store: Path, first_id: int, looks_as: Sequence[str]) -> tuple[str, str]:
    """Return who owns a store, and the files of its checkpoints; nobody else may write there."""
    # Not by its path, which leads through a directory of pytest's that is root's alone.
    above = store.parents[1]
    find = [*looks_as, "find", str(store.relative_to(above)), "-printf", "%y %U %G %m %P\n"]
    done = subprocess.run(find, cwd=above, check=False, capture_output=True, text=True)
    assert done.returncode == 0 or "No such file" in done.stderr, done.stderr
    root, files = "", set()
    for line in done.stdout.splitlines():
        kind, uid, gid, mode, path = line.split(" ", 4)
        ids = (n - first_id if n >= first_id else n for n in map(int, (uid, gid)))
        owner = f"{':'.join(map(str, ids))} {int(mode, 8):04o}"
        assert kind == "l" or not int(mode, 8) & 0o002, line
        if not path:
            root = owner
        elif kind == "f" and "/" in path and not path.startswith("."):
            files.add(owner)
    return root, ", ".join(sorted(files))


def said(boot: Outcome) -> str:
    """Return what was said of users, and the decision; or the error."""
    texts = [f"{code}: {text}" for code, text in boot.lines if code.startswith("user.")]
    errors = [text for code, text in boot.lines if code == "error"]
    ends = [code for code in boot.reasons if not code.startswith("state.")][-1:]
    ends += [code for code in boot.reasons if code == "state.unwritable"]
    return "; ".join([*texts, *(errors or [f"`{code}`" for code in ends])])
