"""Keep a native library's own prints off standard output.

HiGHS writes a line straight to file descriptor 1 whenever it repairs a solution, whatever its logging options say; that
would stand in the middle of the JSON that ``partition plan --json`` writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


def _flush_c() -> None:
    """What C code has printed may still be in its buffer; it must leave while the descriptor points where it should."""
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send file descriptor 1 to nowhere for the duration. Does nothing if the process has no standard output."""
    try:
        saved = os.dup(1)
    except OSError:
        yield
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        _flush_c()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        try:
            yield
        finally:
            _flush_c()
            os.dup2(saved, 1)
    finally:
        os.close(saved)
