"""Where a process begins and ends: the only reader of argv and environ, and the only exit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from entrypoint.errors import Interrupted, RefusedError, ShardbootError, exit_code_of, one_line
from entrypoint.log import Log
from entrypoint.start import is_off, new_boot, read_when_off, take_credentials, unchecked_log

if TYPE_CHECKING:
    from entrypoint.assess import Boot

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DAEMONS: Final = ("serve", "sidecar")
"""Commands whose stderr is a log: they run until they are told to end."""


def main() -> NoReturn:
    """Run a command; print our errors as one line and a hint, and exit with their code."""
    for number in STOPPING:
        # What a parent ignores stays ignored, as nohup wants it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    # But where that of children is, nobody can wait for one: no look would have an answer.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    arguments: Sequence[str] = sys.argv[1:]
    try:
        if arguments[:1] == ["enter"]:
            arguments = _enter(arguments[1:])
        sys.exit(_run(arguments))
    except (Interrupted, ShardbootError) as error:
        _end(error, _log_of(arguments))


def _end(error: ShardbootError | Interrupted, log: Log) -> NoReturn:
    """Exit with an error's code; for people it is a line and a hint, else one event."""
    code = exit_code_of(error)
    if isinstance(error, Interrupted):
        if log.as_json:
            log.line("stopped", str(error), status=code)
        else:
            _say(str(error))
    elif log.as_json:
        log.line(error.reason, str(error), hint=error.hint, status=code)
    else:
        _say(f"error: {error.reason}: {error}")
        if error.hint:
            _say(f"hint: {error.hint}")
    sys.exit(code)


def _log_of(arguments: Sequence[str]) -> Log:
    """Return where a command tells of what perhaps kept it from parsing its flags."""
    flag = "--log-format"
    given = [word for before, word in pairwise(arguments) if before == flag]
    given += [each.removeprefix(f"{flag}=") for each in arguments if each.startswith(f"{flag}=")]
    is_daemon = next(iter(arguments), "") in DAEMONS
    flags = {"log_format": given[-1]} if given else {}
    return unchecked_log(flags, os.environ, is_daemon=is_daemon)


def _say(text: str) -> None:
    # A closed stderr must not change the exit status.
    with suppress(OSError):
        os.write(2, f"shardboot: {one_line(text)}\n".encode(errors="replace"))


def _run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; `serve` returns none."""
    match arguments:
        case ["serve", word, *_] if not word.startswith("-"):
            # As an image starts it: no word is ours, so there is nothing to parse, and click, half
            # of what a hit costs, need not be imported.
            serve({}, tuple(arguments[1:]))
    from entrypoint import commands  # noqa: PLC0415

    done = commands.run(arguments, os.environ)
    return done if isinstance(done, int) else serve(*done)


def _enter(words: Sequence[str]) -> Sequence[str]:
    """Return the command of ours that an image's words mean, or become the program that they do."""
    from entrypoint import image, launch  # noqa: PLC0415 - only an image needs them

    arguments, program, near = image.enter(words, os.environ)
    if program is not None:
        launch.become(program, arguments, os.environ)
    if near:
        text = f"{words[0]!r} is taken for a model's name; if a command was meant, it is {near!r}"
        _log_of(arguments).line("image.model", text)
    return arguments


def serve(flags: Mapping[str, Any], words: tuple[str, ...]) -> NoReturn:
    """Make sure of a checkpoint, then become vLLM on it; on the user's words alone when off."""
    from entrypoint import boot  # noqa: PLC0415 - other commands need it not

    if is_off(os.environ):
        _keep_out(flags, words)
    this = new_boot(flags, words, os.environ, serves=True)
    if this.settings.standby:
        from entrypoint.start import another  # noqa: PLC0415 - the default is exec
        from entrypoint.supervise.supervisor import Supervisor  # noqa: PLC0415

        # Comes back in a fork for each boot; the supervisor itself ends here.
        this = Supervisor(this, another).run()
    try:
        boot.serve(this)
    except Interrupted as error:
        _end(error, this.log)
    except Exception as error:  # noqa: BLE001 - the one guard: a server must not stay down for us
        _survive(error, this)


def _keep_out(flags: Mapping[str, Any], words: tuple[str, ...]) -> NoReturn:
    """Become vLLM as if shardboot were not there, but never as root where a user is named.

    Nor without the key that a file holds: that server would answer everybody.
    """
    from entrypoint import launch  # noqa: PLC0415 - most are switched on
    from entrypoint.engine.executable import locate  # noqa: PLC0415
    from entrypoint.privilege.stepping_down import become_user  # noqa: PLC0415
    from entrypoint.supervise.notify import notify  # noqa: PLC0415

    take_credentials(os.environ)
    # For a unit that waits for a supervisor's word.
    notify(os.environ, READY="1")
    vllm, user, state_dir = read_when_off(flags, os.environ)
    become_user(user, os.environ, caches_in=state_dir)
    launch.become(locate(vllm, os.environ), ["serve", *words], os.environ)


def _survive(error: Exception, this: Boot) -> NoReturn:
    """Serve the source where the policy allows; else let the error end the process."""
    from entrypoint import boot  # noqa: PLC0415 - it is there by now

    code = exit_code_of(error) if isinstance(error, ShardbootError) else 1
    is_final = isinstance(error, RefusedError) or code in boot.NEVER_FAIL_OPEN
    reason = error.reason if isinstance(error, ShardbootError) else "internal.error"
    if is_final or code in (126, 127) or this.settings.on_failure == "refuse":
        this.status.phase("failed", str(error), reason=reason)
        if isinstance(error, ShardbootError):
            _end(error, this.log)
        raise error
    if reason == "internal.error":
        import traceback  # noqa: PLC0415 - milliseconds, and a hit needs none

        traceback.print_exception(error)
    boot.fall_back(this, reason, f"serving the source as if shardboot were not there: {error}")


def _interrupt(number: int, _frame: FrameType | None) -> None:
    # Only the first one interrupts: cleaning up must not be interrupted itself.
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


if __name__ == "__main__":
    main()
