"""What a bench has found: series of numbers, told as a table and kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

ROOT: Final = Path(__file__).resolve().parents[2]


class Series(NamedTuple):
    """The values of one way to do a thing, in the order in which they were measured."""

    panel: str
    way: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        """The smallest and the largest value."""
        return f"{min(self.values):.2f} to {max(self.values):.2f}"


class Results:
    """Series by panel (`warm`, `cold`) and way; ratios are to the way called `base`.

    A way is drawn and listed where its first value came. `about` says what was measured: sizes,
    rounds, flags.
    """

    def __init__(self, bench: str, about: str, base: str, unit: str = "s") -> None:
        self.bench, self.about, self.base, self.unit = bench, about, base, unit
        self.notes: list[str] = []
        self.machine = machine()
        self._values: dict[tuple[str, str], list[float]] = {}

    def add(self, panel: str, way: str, value: float) -> None:
        """Take a value in."""
        self._values.setdefault((panel, way), []).append(value)

    def note(self, text: str) -> None:
        """Take a sentence in that a reader must know: what was not run, and why."""
        if text not in self.notes:
            self.notes.append(text)

    def panels(self) -> dict[str, list[Series]]:
        """Return the series by panel."""
        found: dict[str, list[Series]] = {}
        for (panel, way), values in self._values.items():
            found.setdefault(panel, []).append(Series(panel, way, tuple(values)))
        return found

    def ratio(self, series: Series) -> float | None:
        """Return how many times the base of its panel a series' median is; None without a base.

        Nor is anything a multiple of nothing, such as of no zombies.
        """
        base = statistics.median(self._values.get((series.panel, self.base)) or [0.0])
        return series.median / base if base else None

    def markdown(self) -> str:
        """Return one table for each panel, with what was measured before and the notes behind."""
        lines = [f"## {self.bench}", "", f"{self.about}."]
        for panel, series in self.panels().items():
            head = f"| {panel} | {self.unit}, median | x {self.base} | range | runs |"
            lines += ["", head, "|---|---|---|---|---|"]
            for one in series:
                ratio = self.ratio(one)
                times = "" if ratio is None else f"{ratio:.2f}"
                row = f"| {one.way} | {one.median:.2f} | {times} | {one.spread} |"
                lines.append(f"{row} {len(one.values)} |")
        lines += [line for note in self.notes for line in ("", note)]
        return "\n".join([*lines, ""])

    def keep(self, folder: Path | None) -> None:
        """Print the tables; with a folder, leave `BENCH.json` there as well. Raises: OSError."""
        print(f"\n{self.markdown()}", flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            record = vars(self) | {
                "_values": [[*names, values] for names, values in self._values.items()]
            }
            (folder / f"{self.bench}.json").write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what `keep` has left. Raises: OSError; ValueError, KeyError, TypeError."""
        record: dict[str, Any] = json.loads(path.read_text())
        found = cls(record["bench"], record["about"], record["base"], record["unit"])
        found.notes, found.machine = record["notes"], record["machine"]
        for panel, way, values in record["_values"]:
            found._values[panel, way] = values
        return found


def machine() -> dict[str, str]:
    """Return what figures depend on: when, where, and by what."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "cores": f"{os.cpu_count()} ({_processor()})",
        "memory": f"{memory / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("vllm", "torch")},
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
