"""``path/to/file.py:factory`` and ``package.module:factory``: the user's own code, run to build the model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from partitioner.errors import CaptureError, UsageError
from partitioner.program import Recipe


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    name = f"_gatherpoint_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses and pickling inside the file work
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def load_callable(spec: str) -> Callable[..., Any]:
    """The factory that a spec names. Raises UsageError or CaptureError naming the spec."""
    location, _, attribute = spec.rpartition(":")
    if not location or not attribute:
        raise UsageError(f"{spec!r} names no factory", hint="write path/to/file.py:factory or package.module:factory")
    try:
        module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{spec}: cannot import {error.name!r}", hint="is it installed, or is the path wrong?"
        ) from error
    except Exception as error:
        raise CaptureError(f"{location} raised {type(error).__name__}: {error}{_where(error)}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise UsageError(
            f"{location} has no factory {attribute!r}", hint="it has: " + (", ".join(names) or "no functions")
        )
    return factory  # type: ignore[no-any-return]  # whatever the user's file holds


def _shape_of(made: object) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(part).__name__ for part in made) + ")"
    return type(made).__name__


def load_factory(spec: str, recipe: Recipe) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Run a factory; pass ``batch`` and ``seq`` if it takes them.

    Returns:
        (module, args, kwargs) for its forward.
    """
    factory = load_callable(spec)
    offered = {"batch": recipe.batch, "seq": recipe.seq}
    try:
        takes = inspect.signature(factory).parameters
        made = factory(**{k: v for k, v in offered.items() if k in takes and v is not None})
    except Exception as error:
        raise CaptureError(f"factory {spec} raised {type(error).__name__}: {error}{_where(error)}") from error
    parts = made if isinstance(made, tuple) else (made,)
    module = parts[0] if parts else None
    args = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if not isinstance(module, nn.Module) or len(parts) > 3 or not isinstance(kwargs, dict):
        raise UsageError(
            f"factory {spec} returned {_shape_of(made)}, not an nn.Module, (module, args) or (module, args, kwargs)"
        )
    if not isinstance(args, tuple):
        args = (args,)
    if not args and not kwargs:
        raise UsageError(
            f"factory {spec} gave no inputs", hint="return (module, args) with one example batch; meta tensors will do"
        )
    return module, args, kwargs
