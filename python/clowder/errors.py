"""The one error type of Clowder, and its warning."""

from __future__ import annotations


class ClowderError(RuntimeError):
    """`ClowderError(code, message)`: an error of Clowder.

    Attributes:
        code: what kind of error it is.
            "argument": a value cannot be used; the message names the argument, its value and what it may be.
            "unsupported": right, but not on this machine or in this build.
            "timeout": a wait ran out of time, or the workspace is dead since one did; the message names ranks and phase.
            "internal": a fault of Clowder's own.
    """

    # Without an __init__ of its own, because torch.compile cannot trace one of an exception.

    @property
    def code(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return self.args[1]


class SkippedIdsWarning(UserWarning):
    """`topk_idx` held ids that are neither -1 nor an expert; they were counted and skipped."""


def argument_error(name: str, was: object, may_be: str) -> ClowderError:
    """The error for argument `name`, which was `was` and must be what `may_be` says."""
    return ClowderError("argument", f"{name}: {was}, must be {may_be}")
