"""Where instances run: units of systemd, or containers of podman.

Each has its words, settings and variables in a file of its own, NAME.env in one directory. Every
call may be repeated: what is so already is left so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from rolling.command import Command, StepError, run
from rolling.reading import split, text_of

STOP_SECONDS: Final = 30


class Host(Protocol):
    """What can be done to an instance, by its name."""

    def command(self, name: str, *words: str) -> Command:
        """Return the command line that runs `shardboot WORD…` on an instance's words.

        One at a time of an instance: what it runs has a name, by which it is found again.
        """
        ...

    def is_at_it(self, name: str) -> bool:
        """Tell whether such a command still runs, even if whoever waited for it was killed."""
        ...

    def ending(self, name: str) -> Command:
        """Return the command line that ends such a command, and waits."""
        ...

    def is_up(self, name: str) -> bool:
        """Tell whether it runs, or is about to."""
        ...

    def trouble(self, name: str) -> str:
        """Say why it will not become healthy; empty as long as it may."""
        ...

    def starting(self, name: str) -> Command:
        """Return the command line that starts it, and does not wait."""
        ...

    def stopping(self, name: str) -> Command:
        """Return the command line that stops it, and waits."""
        ...

    def is_enabled(self, name: str) -> bool:
        """Tell whether it starts with the machine."""
        ...

    def enable(self, name: str, *, yes: bool) -> None:
        """Have it start with the machine from now on, or not any more."""
        ...


class Systemd:
    """Instances of scripts/systemd/shardboot@.service."""

    def __init__(self, directory: Path, program: Path) -> None:
        self.directory, self.program = directory, program

    @staticmethod
    def unit(name: str) -> str:
        return f"shardboot@{name}.service"

    @staticmethod
    def errand(name: str) -> str:
        return f"shardboot-checkpoint-{name}.service"

    def command(self, name: str, *words: str) -> Command:
        # systemd itself reads the file and splits the words, as it does for the unit, as whose user
        # this runs.
        command = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect"]
        command.append(f"--unit={self.errand(name)}")
        if user := self._show(self.unit(name), "User")["User"]:
            command.append(f"--uid={user}")
        command += [f"--property=EnvironmentFile={self.directory / name}.env"]
        command += [f"--setenv=PATH={self.program.parent}:/usr/local/bin:/usr/bin:/bin"]
        return Command([*command, str(self.program), *words, "$WORDS"])

    def is_at_it(self, name: str) -> bool:
        return self._is_active(self.errand(name))

    def ending(self, name: str) -> Command:
        return Command(["systemctl", "stop", self.errand(name)])

    def is_up(self, name: str) -> bool:
        return self._is_active(self.unit(name))

    def trouble(self, name: str) -> str:
        found = self._show(self.unit(name), "ActiveState", "Result", "NRestarts")
        if found["ActiveState"] in {"inactive", "failed"}:
            return f"has ended: {found['Result']} (journalctl -u {self.unit(name)})"
        if found["NRestarts"] not in {"", "0"}:
            return f"has ended, and was started again (journalctl -u {self.unit(name)})"
        return ""

    def starting(self, name: str) -> Command:
        return Command(["systemctl", "start", "--no-block", self.unit(name)])

    def stopping(self, name: str) -> Command:
        return Command(["systemctl", "stop", self.unit(name)])

    def is_enabled(self, name: str) -> bool:
        return self._show(self.unit(name), "UnitFileState")["UnitFileState"] == "enabled"

    def enable(self, name: str, *, yes: bool) -> None:
        run(["systemctl", "enable" if yes else "disable", "--quiet", self.unit(name)])

    def _is_active(self, unit: str) -> bool:
        return self._show(unit, "ActiveState")["ActiveState"] not in {"inactive", "failed"}

    @staticmethod
    def _show(unit: str, *properties: str) -> dict[str, str]:
        told = run(["systemctl", "show", f"--property={','.join(properties)}", unit])
        found = dict(line.partition("=")[::2] for line in told.splitlines())
        return {each: found.get(each, "") for each in properties}


class Podman:
    """Containers; the file also has IMAGE, and podman's own words as PODMAN."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @staticmethod
    def errand(name: str) -> str:
        return f"{name}-checkpoint"

    def command(self, name: str, *words: str) -> Command:
        return self._run(name, ["--rm", "--replace", "--name", self.errand(name)], words)

    def is_at_it(self, name: str) -> bool:
        return self.is_up(self.errand(name))

    def ending(self, name: str) -> Command:
        return self.stopping(self.errand(name))

    def is_up(self, name: str) -> bool:
        return self._state(name)[0] in {"running", "paused", "stopping"}

    def trouble(self, name: str) -> str:
        if self.is_up(name):
            return ""
        state, status = self._state(name)
        return f"has ended: {state or 'gone'}, exit status {status} (podman logs {name})"

    def starting(self, name: str) -> Command:
        # One that has ended makes way: the file may say something else by now.
        return self._run(name, ["--detach", "--replace", "--name", name], [])

    def stopping(self, name: str) -> Command:
        # It stays as it is, with its log.
        return Command(["podman", "stop", "--ignore", "--time", str(STOP_SECONDS), name])

    def is_enabled(self, name: str) -> bool:  # noqa: ARG002 - as every host
        return False  # its restart policy tells, and a container that was stopped stays so

    def enable(self, name: str, *, yes: bool) -> None:
        """Do nothing, see `is_enabled`."""

    def _run(self, name: str, options: Sequence[str], words: Sequence[str]) -> Command:
        path = self.directory / f"{name}.env"
        found = variables(path)
        missing = [each for each in ("IMAGE", "WORDS") if not found.get(each)]
        if missing:
            raise StepError(f"{path}: no line {missing[0]}=…")
        fixed = ["podman", "run", *options, "--env-file", str(path)]
        more = split(found.get("PODMAN", ""), f"{path}: PODMAN")
        served = [found["IMAGE"], *words, *split(found["WORDS"], f"{path}: WORDS")]
        told = [*fixed, "$PODMAN", "$IMAGE", *words, "$WORDS"]
        return Command([*fixed, *more, *served], " ".join(told))

    @staticmethod
    def _state(name: str) -> tuple[str, int]:
        """Return state and exit status, empty if there is no such container."""
        told = run(["podman", "ps", "--all", "--filter", f"name=^{name}$", "--format", "json"])
        try:
            found = json.loads(told or "[]")
            return (str(found[0]["State"]), int(found[0]["ExitCode"])) if found else ("", 0)
        except (ValueError, TypeError, LookupError):
            raise StepError(f"podman ps did not say how it is with {name}") from None


def variables(path: Path) -> dict[str, str]:
    """Read a file of NAME=VALUE lines as podman does: no quotes, `#` begins a comment line.

    Raises: StepError.
    """
    lines = text_of(path).splitlines()
    found = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value for name, _, value in found}
