"""What follows from the end of a server. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from typing import Final, NamedTuple

STEADY_SECONDS: Final = 10.0
"""Who has served for so long was no failure: its end is the first of a new row."""

GAVE_UP: Final = 70
NO_PROGRAM: Final = (126, 127)
"""How a boot ends that was to become vLLM, and found that it cannot be executed."""


class End(NamedTuple):
    """How a server ended: its status as a shell has it, 128+n for signal n.

    `served`: for how many seconds, None where it never did. `began`: whether vLLM began at all;
    else a boot refused, or failed, before it. `why`: what the supervisor ended it for itself.
    """

    status: int
    served: float | None
    began: bool
    why: str = ""

    @property
    def was_steady(self) -> bool:
        """Whether it had served for long."""
        return self.served is not None and self.served >= STEADY_SECONDS

    @property
    def text(self) -> str:
        """Say what happened, to people."""
        what = "vLLM" if self.began else "the boot"
        how = f"was ended by signal {self.status - 128}" if self.status > 128 else ""  # noqa: PLR2004 - as shells count
        how = how or f"ended with {self.status}"
        when = (
            "before it served" if self.served is None else f"after {self.served:.0f} s of service"
        )
        return f"{what} {how} {when}{f' ({self.why})' if self.why else ''}"


class Again(NamedTuple):
    """Start another one, after so many seconds; it is the `number`th in a row that ended early."""

    delay: float
    number: int


class GiveUp(NamedTuple):
    """Start none any more, and exit with this."""

    status: int
    text: str


def follow(end: End, row: int, most: int, longest: float) -> Again | GiveUp:
    """Return what follows from an end, after `row` others in a row that came early.

    The first restart is at once, the others after 2, 4, 8 … seconds, `longest` at most. After
    `most` in a row, 0 for no limit, it is given up.
    A boot that did not come to vLLM, or to one that cannot be executed, has said what must be
    mended: no restart mends it. One that a signal has ended could say nothing.
    """
    is_none = end.served is None and end.status in NO_PROGRAM
    if is_none or (not end.began and end.status <= 128):  # noqa: PLR2004 - as shells count
        return GiveUp(end.status, end.text)
    number = 1 if end.was_steady else row + 1
    if most and number > most:
        return GiveUp(GAVE_UP, f"{end.text}; {most} restarts in a row did not help")
    return Again(0.0 if number == 1 else min(2.0 ** min(number - 1, 30), longest), number)
