"""The image that the tests run: Debian with the tests' own vLLM below, our Dockerfile on top."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PODMAN: Final = ("podman", "--runtime", "runc")
SUITE: Final = "bookworm"
# vLLM's kernels want libnuma1; an interpreter from elsewhere wants the libraries of Debian's own.
PACKAGES: Final = "libnuma1,python3"
VLLM_HOME: Final = "/opt/vllm"
"""Where vLLM lies in the image: a Python of its own, with what is mounted from here."""

SEARCH_PATH: Final = f"{VLLM_HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# After pip, setuptools cannot be imported everywhere.
PREFLIGHT: Final = "import blake3, click, ctypes, setuptools, sqlite3, ssl"


@contextlib.contextmanager
def shared_image(room: Path) -> Iterator[str]:
    """Yield the tag of the image, which all workers of one run share; who leaves last removes it.

    Skips, with the reason, where there can be none.
    """
    with (room / "image.users").open("w") as users, (room / "image.tag").open("a+") as file:
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        tag = file.read()
        if not tag:
            tag = f"localhost/shardboot-test:{uuid.uuid4().hex}"
            make(room / "image", tag)
            print(tag, end="", file=file, flush=True)
        fcntl.flock(file, fcntl.LOCK_UN)
        yield tag
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            podman("rmi", "--force", tag, base_of(tag))


def make(room: Path, tag: str) -> None:
    """Build the Dockerfile on a base image made of Debian and the environment of the tests."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and podman")
    for program in ("podman", "runc", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (scripts/packages)")
    base = base_of(tag)
    make_base(room, base)
    with contextlib.ExitStack() as stack:
        stack.callback(podman, "rmi", "--force", base)
        preflight = ("--user", "2000:2000", base, "python3", "-c", PREFLIGHT)
        done = podman("run", "--rm", *limits(), *volumes(), *preflight)
        if done.returncode != 0:
            pytest.skip(f"{sys.executable} cannot run in a container: {last_line(done.stderr)}")
        build(tag, base)
        stack.pop_all()


def base_of(tag: str) -> str:
    """Return the tag of what an image of ours stands on."""
    return f"{tag}-base"


def make_base(room: Path, tag: str) -> None:
    """Import a Debian whose `vllm` is the one of this environment, mounted; shardboot left out."""
    root, archive = room / "base", room / "base.tar"
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    done = subprocess.run(bootstrap, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"debootstrap cannot work here: {last_line(done.stdout + done.stderr)}")
    make_way(root, mounts())
    install_vllm(root / VLLM_HOME.removeprefix("/"))
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    done = podman("import", "--quiet", "--change", f"ENV PATH={SEARCH_PATH}", str(archive), tag)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(room)


def make_way(root: Path, mounted: list[Path]) -> None:
    """Let everybody in a Debian pass to what will be mounted there."""
    for path in mounted:
        for parent in reversed(path.parents[:-1]):
            inside = root / parent.relative_to("/")
            inside.mkdir(exist_ok=True)
            # The service user passes here, and root's home is closed to it.
            inside.chmod(inside.stat().st_mode | 0o755)


def install_vllm(home: Path) -> None:
    """Make a Python that has everything of ours but shardboot, and a `vllm` that it runs.

    Beside it lie a module without bytecode, and a file that is no Python.
    """
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # Bytecode is made in the image itself.
        if "shardboot" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    (site / "beside.py").write_text("told = 1\n")
    (site / "template.py").write_text("{{ told }} = 1\n")
    _, _, script = Path(sys.executable).with_name("vllm").read_text().partition("\n")
    vllm = home / "bin" / "vllm"
    vllm.write_text(f"#!{VLLM_HOME}/bin/python3\n{script}")
    vllm.chmod(0o755)


def build(tag: str, base: str, checkout: Path = ROOT, kind: str = "docker") -> None:
    """Build the Dockerfile as an image of that kind; fails where it cannot be built."""
    done = try_to_build(tag, base, checkout, kind)
    assert done.returncode == 0, done.stdout + done.stderr


def try_to_build(
    tag: str, base: str, checkout: Path = ROOT, kind: str = "docker"
) -> subprocess.CompletedProcess[str]:
    """Build the Dockerfile without any network: vLLM's image has all that shardboot needs.

    All that it adds is dated as its bytecode is: at no time.
    """
    words = ["--format", kind, "--layers=false", "--network", "none", *limits(), *volumes()]
    words += ["--timestamp", "0", "--build-arg", f"VLLM_IMAGE={base}", "--tag", tag, str(checkout)]
    return podman("build", *words)


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    """Run podman to its end."""
    command = [*PODMAN, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=surrounding())


def surrounding() -> dict[str, str]:
    """Return podman's environment: it shall not look for a systemd to time health checks."""
    return {**os.environ, "DISABLE_HC_SYSTEMD": "true"}


def limits() -> list[str]:
    # podman's own limits are far above these, which takes CAP_SYS_RESOURCE; a sandbox may lack it.
    return ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]


def mounts() -> list[Path]:
    """Return what holds the environment, its interpreter and stubs; none inside another."""
    wanted = sorted({ROOT / "tests", Path(sys.prefix), Path(sys.base_prefix)})
    return [path for path in wanted if not any(other in path.parents for other in wanted)]


def volumes() -> list[str]:
    return [word for path in mounts() for word in ("--volume", f"{path}:{path}:ro")]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
