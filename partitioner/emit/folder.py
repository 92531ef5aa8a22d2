"""Write an output folder whole or not at all.

The folder is built beside its place under a hidden name, every file is flushed to the disk, and only then does it take
the place. An older output is moved aside first and moved back if that last step fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from partitioner.errors import EmitError, UsageError

Content = str | Callable[[Path], None]
"""Text of a file, or a function that writes the file at the path it is given."""

SCHEMA_PREFIX = "gatherpoint.plan/"
OUR_FILES = frozenset({"plan.json", "parallelize.py", "train.py", "offload.py", "model.py", "weights.safetensors"})
"""Names that any version of this tool has written; an output that holds only these may be replaced."""


def _is_our_plan(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and str(data.get("schema", "")).startswith(SCHEMA_PREFIX)


def check_folder(out: Path, names: Iterable[str] = ()) -> None:
    """Whether ``out`` may be written, asked before any long work.

    It may if it does not exist, is an empty folder, or is an earlier output: a folder with a ``plan.json`` of this tool
    and nothing that this tool does not write (``__pycache__`` aside). Nobody's other files are ever deleted.

    Args:
        out: the folder to be.
        names: what will be written, beside the names in ``OUR_FILES``.

    Raises:
        UsageError: naming what is in the way.
    """
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{out}: the folder {parent} does not exist", hint=f"make it first: mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{out}: no permission to write in {parent}", hint="choose another folder with -o")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is not a folder", hint="choose another name with -o")
    entries = sorted(entry.name for entry in out.iterdir())
    if not entries:
        return
    if not _is_our_plan(out / "plan.json"):
        raise UsageError(
            f"{out} exists and was not written by this tool", hint="choose another folder with -o, or remove this one"
        )
    foreign = [name for name in entries if name not in OUR_FILES.union(names, {"__pycache__"})]
    if foreign:
        raise UsageError(
            f"{out} holds {foreign[0]}, which was not written by this tool",
            hint="move it away, or choose another folder with -o",
        )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_files(folder: Path, files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        path = folder / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="\n")
        else:
            content(path)
        _flush(path)


def _take_place(built: Path, out: Path, aside: Path) -> None:
    """Move ``built`` to ``out``; what was there comes back if that fails."""
    if not out.exists():
        os.rename(built, out)
    else:
        os.rename(out, aside)
        try:
            os.rename(built, out)
        except BaseException:
            os.rename(aside, out)
            raise
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        _flush(out.parent)


def write_folder(out: Path, files: Mapping[str, Content]) -> None:
    """Write ``files`` as the folder ``out``, replacing an earlier output.

    Args:
        out: the folder; its parent must exist.
        files: plain file names and what goes into them, written in this order.

    Raises:
        UsageError: ``out`` may not be written (see ``check_folder``).
        EmitError: the disk is full or refuses. Neither a half output nor a temporary folder is left, also after Ctrl-C.
    """
    check_folder(out, files)
    place = out.resolve()
    built = place.parent / f".{place.name}.{os.getpid()}.new"
    aside = place.parent / f".{place.name}.{os.getpid()}.old"
    try:
        os.mkdir(built)
        _write_files(built, files)
        _take_place(built, place, aside)
    except OSError as error:
        raise EmitError(
            f"cannot write {out}: {error.strerror or error}",
            hint="nothing was left behind; earlier output is unchanged",
        ) from error
    finally:
        shutil.rmtree(built, ignore_errors=True)
