"""Every failure the package reports: one typed error with what, where and what to do next.

The library raises these; only ``cli.py`` turns them into a line on stderr and an exit code.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_OUR_FAULT = 1
EXIT_WRONG_USE = 2
EXIT_INFEASIBLE = 3


class PartitionerError(Exception):
    """A failure with a remedy.

    Args:
        what: one sentence naming the thing, what was got and what was expected.
        hint: what the user can do next; empty when the first sentence already says it.
    """

    exit_code = EXIT_OUR_FAULT

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  {self.hint}" if self.hint else self.what


class UsageError(PartitionerError):
    """The user asked for something that cannot be: a wrong flag, a missing file, an unknown name."""

    exit_code = EXIT_WRONG_USE


class CaptureError(PartitionerError):
    """The model could not be read or traced."""

    exit_code = EXIT_WRONG_USE


class TableError(CaptureError):
    """A constant index lies beyond the end of a table of parameters: the sequence is longer than its positions.

    Args:
        what: as ever.
        rows: how many the table has.
        hint: as ever.
    """

    def __init__(self, what: str, *, rows: int, hint: str = "") -> None:
        super().__init__(what, hint=hint)
        self.rows = rows


class UnsupportedError(PartitionerError):
    """The model is readable, but a part of it has no meaning here yet; the message names the part."""

    exit_code = EXIT_WRONG_USE


class PassError(PartitionerError):
    """A pass found its precondition unmet, broke the graph, or misreported what it changed."""


class PlanError(PartitionerError):
    """A plan file is unreadable, of another schema, or does not belong to this model."""

    exit_code = EXIT_WRONG_USE


class EmitError(PartitionerError):
    """The output could not be written; nothing was left behind."""


class VerifyError(PartitionerError):
    """The emitted module does not compute what the original computes."""
