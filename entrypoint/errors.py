"""The one tree of errors: each class has one exit code, and a message that a tired reader can use.

A message says what failed, where, and what was expected and found; `hint` says what to do next.
Rooms raise; only `cli` catches, prints and exits.
"""

from __future__ import annotations

from typing import ClassVar, Final

LONGEST_LINE: Final = 2000


def one_line(text: str) -> str:
    """Return `text` as one printable line of bounded length.

    What foreign files hold must neither end a line of a log nor speak to a terminal.
    """
    if len(text) > LONGEST_LINE:
        text = f"{text[:LONGEST_LINE]} …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class ShardbootError(Exception):
    """Any failure that shardboot names.

    `reason` is the dotted word that a fallback caused by this failure is reported under. The
    message is one printable line, whatever foreign names it was made of.
    """

    exit_code: ClassVar[int] = 1
    reason: str = "internal.error"

    def __init__(self, message: str, *, hint: str = "", reason: str = "") -> None:
        super().__init__(one_line(message))
        self.hint = hint
        if reason:
            self.reason = reason


class ConfigError(ShardbootError):
    """A setting is unknown, malformed, or contradicts another one."""

    exit_code = 10
    reason = "config.invalid"


class ManifestError(ShardbootError):
    """A manifest or index is not what schema 1 allows."""

    exit_code = 20
    reason = "checkpoint.manifest"


class SchemaError(ManifestError):
    """A sound manifest that another version of shardboot wrote; `found` is its schema."""

    def __init__(self, message: str, *, found: int) -> None:
        super().__init__(message, hint="the checkpoint was made by another shardboot version")
        self.found = found


class DamagedError(ShardbootError):
    """A checkpoint's files are not what its manifest says; `file` is the one, "" for any."""

    exit_code = 21
    reason = "checkpoint.damaged"

    def __init__(self, message: str, *, hint: str = "", file: str = "") -> None:
        super().__init__(message, hint=hint)
        self.file = file


class KeyMismatchError(ShardbootError):
    """A checkpoint was made for something else than what is wanted."""

    exit_code = 22
    reason = "checkpoint.foreign"


class StoreError(ShardbootError):
    """A store cannot be read or written."""

    exit_code = 30
    reason = "store.unreachable"


class NotFoundError(ShardbootError):
    """No checkpoint of that name, or none that fits, is in the store."""

    exit_code = 31
    reason = "store.absent"


class StagingError(ShardbootError):
    """A checkpoint could not be built or committed; nothing was published."""

    exit_code = 40
    reason = "staging.failed"


class LockTimeoutError(ShardbootError):
    """Another process holds what is needed, and the bound for waiting has passed."""

    exit_code = 41
    reason = "lock.timeout"


class SpaceError(ShardbootError):
    """The file system or the budget has no room; nothing was published."""

    exit_code = 42
    reason = "space.short"


class SaveError(ShardbootError):
    """The save child failed, was killed or ran out of time; nothing was published."""

    exit_code = 50
    reason = "save.failed"


class ProofError(ShardbootError):
    """A checkpoint does not load to the state that the source gives."""

    exit_code = 51
    reason = "save.unproven"


class OwnershipError(ShardbootError):
    """A path cannot be given to, or used by, the service user."""

    exit_code = 60
    reason = "access.denied"


class PrivilegeError(ShardbootError):
    """The service user is unknown, or root could not be dropped for good."""

    exit_code = 61
    reason = "privilege.failed"


class EngineError(ShardbootError):
    """vLLM could not be asked; says why. Boot falls back to the user's own words."""

    exit_code = 1
    reason = "engine.failed"


class ExecError(ShardbootError):
    """The program to become is not there (127) or not executable (126)."""

    reason = "exec.failed"

    def __init__(self, message: str, *, found: bool, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.found = found


class RefusedError(ShardbootError):
    """Boot will not serve: no checkpoint fits, or a step failed and the policy is to refuse.

    Carries the exit code of what stood in the way.
    """

    def __init__(self, message: str, *, reason: str, code: int) -> None:
        super().__init__(message, reason=reason)
        self.code = code


class Interrupted(BaseException):
    """A termination signal arrived before exec. Like KeyboardInterrupt, no fallback catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def exit_code_of(error: ShardbootError | Interrupted) -> int:
    """Return the process exit status that stands for `error` (docs/reasons.md has the table)."""
    match error:
        case ExecError():
            return 126 if error.found else 127
        case RefusedError():
            return error.code
        case Interrupted():
            return 128 + error.signal_number
        case _:
            return error.exit_code
