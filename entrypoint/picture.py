"""Drawing what a command has measured, into a file that it is told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

import click

from entrypoint.errors import OwnershipError
from entrypoint.insight import plot
from entrypoint.insight.plot import Drawing


def _picture(_ctx: click.Context, _parameter: click.Parameter, word: str | None) -> Path | None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    if word is None:
        return None
    path = Path(word)
    if path.suffix not in (".svg", ".png"):
        msg = f"expected FILE.svg or FILE.png, found {word!r}"
        raise click.BadParameter(msg)
    if not path.parent.is_dir():
        msg = f"{path.parent}: not a directory"
        raise click.BadParameter(msg)
    if path.suffix == ".png" and importlib.util.find_spec("PIL") is None:
        msg = f"a PNG needs Pillow: {sys.executable} -m pip install pillow; an SVG needs nothing"
        raise click.BadParameter(msg)
    return path


with_plot: Final = click.option(
    "--plot", "picture", callback=_picture, metavar="FILE", help="draw it as well: .svg or .png"
)


def paint(path: Path, drawing: Drawing) -> None:
    """Write a drawing as the file's suffix says. Raises: OwnershipError."""
    try:
        if path.suffix == ".png":
            path.write_bytes(plot.as_png(drawing))
        else:
            path.write_text(plot.as_svg(drawing))
    except OSError as error:
        raise OwnershipError(f"{path}: {error.strerror}", hint="name another file") from None
