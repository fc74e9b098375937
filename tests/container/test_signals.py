"""Signals to a container's first process, in every phase of a boot, and what becomes of orphans.

With `pytest -s` it prints the table of docs/containers.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from blackbox.harness import House
from container.harness import Container, zombies
from container.node import Node, give
from processes import descendants, start_of
from waiting import until

pytestmark = pytest.mark.container

Words = tuple[str, ...]
Phase = Callable[[Node, Words], Container]

INIT: Final = ("--init",)
GRACE: Final = 3
HEEDS: Final = {"heeds": [signal.SIGTERM, signal.SIGINT]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a shared store that has the checkpoint."""
    house = House(tmp_path_factory.mktemp("publisher"))
    house.serve()
    house.shared_copy()
    give(house.shared)
    yield house.shared
    house.close()


@pytest.fixture
def node(image: str, shared: Path, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, image, shared)
    yield made
    made.close()


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = ["| while | signal | `--init` | exit status | seconds | processes left |"]
    rows.append("|---|---|---|---|---|---|")
    yield rows
    print("", *rows, sep="\n")


def asking(node: Node, options: Words) -> Container:
    node.rules(resolve={"hang": True})
    return begin(node, options, "hanging")


def copying(node: Node, options: Words) -> Container:
    slow = node.slow_reads()
    return begin(node, options, "reading", SHARDBOOT_SHARED=node.shared, **slow)


def saving(node: Node, options: Words) -> Container:
    node.rules(save={"hang": True})
    return begin(node, options, "hanging")


def serving(node: Node, options: Words) -> Container:
    node.rules(serve=HEEDS)
    return begin(node, options, "staying")


def begin(node: Node, options: Words, event: str, **more: object) -> Container:
    container = node.begin(node.model, "-tp", 2, options=options, **more)
    try:
        node.wait_for(event)
    except BaseException:
        container.stop()
        print(container.last_lines())
        raise
    return container


def needs(options: Words) -> None:
    if options == INIT and shutil.which("catatonit") is None:
        pytest.skip("catatonit, podman's init, is not installed (scripts/packages)")


def row(
    phase: str, number: signal.Signals, options: Words, status: int, seconds: float, left: int
) -> str:
    with_init = "with" if options else ""
    cells = (phase, number.name, with_init, status, f"{seconds:.1f}", left)
    return f"| {' | '.join(map(str, cells))} |"


def end(container: Container, number: signal.Signals) -> tuple[float, int]:
    """Send the first process a signal; return the seconds until it was gone, and who was left."""
    family, main = container.family(), Path("/proc", str(container.main_pid()))
    started = time.monotonic()
    os.kill(int(main.name), number)
    while main.exists() and time.monotonic() < started + 10:
        time.sleep(0.01)
    seconds = time.monotonic() - started
    container.process.wait(10)
    return seconds, sum(start_of(pid) == start for pid, start in family.items())


@pytest.mark.parametrize(
    ("phase", "number", "status", "options"),
    [
        (asking, signal.SIGTERM, 143, ()),
        (copying, signal.SIGTERM, 143, ()),
        (copying, signal.SIGINT, 130, ()),
        (saving, signal.SIGTERM, 143, ()),
        (saving, signal.SIGTERM, 143, INIT),
        (saving, signal.SIGINT, 130, ()),
        (serving, signal.SIGTERM, signal.SIGTERM, ()),
        (serving, signal.SIGTERM, signal.SIGTERM, INIT),
        (serving, signal.SIGINT, signal.SIGINT, ()),
    ],
)
def test_a_signal_ends_the_container_at_once(
    phase: Phase, number: signal.Signals, status: int, options: Words, node: Node, table: list[str]
) -> None:
    needs(options)
    with phase(node, options) as container:
        seconds, left = end(container, number)
        found = container.process.returncode
        said = container.last_lines()
    table.append(row(phase.__name__, number, options, found, seconds, left))
    assert (found, left) == (status, 0), said
    assert seconds < 2
    assert "Traceback" not in said
    if phase is copying:
        goes_on_with_the_copy(node)
    if phase is saving:
        saves_anew(node)


def goes_on_with_the_copy(node: Node) -> None:
    done = node.once(node.model, "-tp", 2, SHARDBOOT_SHARED=node.shared)
    assert "copy.resumed" in done.stderr
    assert len(node.store.names()) == 1


def saves_anew(node: Node) -> None:
    assert list((node.local / ".staging").iterdir()) == []
    node.rules()
    done = node.once(node.model, "-tp", 2)
    assert "save.done" in done.stderr
    assert len(node.store.names()) == 1


@pytest.mark.parametrize("options", [(), INIT], ids=["bare", "init"])
def test_without_an_init_a_first_process_is_deaf_until_it_has_a_handler(
    options: Words, node: Node, table: list[str]
) -> None:
    needs(options)
    # As vLLM is while it imports: the kernel drops what a first process has no handler for.
    node.rules(serve={"heeds": []})
    with begin(node, options, "staying") as container:
        seconds = container.podman_stop(GRACE)
        found = container.process.returncode
    table.append(row("importing", signal.SIGTERM, options, found, seconds, 0))
    assert found == (143 if options else 137)
    assert (seconds < GRACE) == bool(options)


@pytest.mark.parametrize("options", [(), INIT], ids=["bare", "init"])
def test_only_an_init_reaps_what_others_leave_to_the_first_process(
    options: Words, node: Node
) -> None:
    needs(options)
    node.rules(serve=HEEDS)
    with begin(node, options, "staying") as container:
        main = container.main_pid()
        settled = set(descendants(main))
        container.orphan(3)
        until(lambda: set(descendants(main)) == settled)
        until(lambda: zombies(main) == (0 if options else 3))


def test_what_a_child_that_dies_leaves_is_reaped_before_vllm_starts(node: Node) -> None:
    node.rules(save={"hang": True}, serve=HEEDS)
    with begin(node, (), "hanging") as container:
        main = container.main_pid()
        (child,) = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        left = descendants(int(child))
        assert left
        os.kill(int(child), signal.SIGKILL)
        node.wait_for("staying")
        assert not [pid for pid, start in left.items() if start_of(pid) == start]
        assert node.served["children"] == []
