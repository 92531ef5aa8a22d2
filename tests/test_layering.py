"""Who may import whom, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("partitioner", "passes")
    for path in sorted((ROOT / package).rglob("*.py"))
}
PASSES_MAY_USE = ("program", "plan", "cost", "errors", "pass_manager", "verify")
NO_TORCH = ("planner", "report", "hardware", "cli", "config", "errors", "plan", "units")


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(module: str, name: str) -> bool:
    """Whether a module of ours may import a name."""
    if under(name, "partitioner.cli"):
        return module == "partitioner.__main__"
    if under(module, "passes") and under(name, "partitioner"):
        return under(name, *(f"partitioner.{part}" for part in PASSES_MAY_USE))
    if under(name, "passes"):
        return under(module, "passes", "partitioner.pipeline", "partitioner.backend")
    if under(name, "torch"):
        return not under(module, *(f"partitioner.{part}" for part in NO_TORCH))
    if under(name, "click"):
        return module == "partitioner.cli"
    return True


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module} imports {name}"
        for module, path in SOURCES.items()
        for line, name in imports_of(path.read_text(encoding="utf-8"))
        if not allowed(module, name)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "name", "fine"),
    [
        ("passes.find_units", "partitioner.program.Program", True),
        ("passes.find_units", "partitioner.planner.problem.Mode", False),
        ("passes.find_units", "partitioner.planner", False),
        ("partitioner.pipeline", "passes.find_units.FindUnits", True),
        ("partitioner.emit.fsdp2", "passes.find_units.FindUnits", False),
        ("partitioner.planner.model", "torch", False),
        ("partitioner.planner.model", "partitioner.plan.Plan", True),
        ("partitioner.report.text", "partitioner.cli.main", False),
        ("partitioner.pipeline", "click", False),
    ],
)
def test_the_rules_themselves(module: str, name: str, fine: bool) -> None:
    assert allowed(module, name) == fine


def test_imports_in_functions_are_found() -> None:
    source = "def f():\n    import torch.fx\n    from passes import a, b\n"
    assert list(imports_of(source)) == [(2, "torch.fx"), (3, "passes.a"), (3, "passes.b")]


def calls_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is called) of calls by plain or dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


PRINTS_OR_EXITS: Callable[[str], bool] = {
    "print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "sys.stderr.write", "breakpoint", "input",
}.__contains__  # fmt: skip


def test_only_the_command_line_prints_or_exits() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {call}()"
        for module, path in SOURCES.items()
        if module != "partitioner.cli"
        for line, call in calls_of(path.read_text(encoding="utf-8"))
        if PRINTS_OR_EXITS(call)
    ]
    assert found == []


def test_calls_are_found() -> None:
    assert [call for _, call in calls_of("def f():\n    sys.exit(g(1))\n") if PRINTS_OR_EXITS(call)] == ["sys.exit"]


def test_the_planner_runs_without_torch() -> None:
    """Not even by way of another room."""
    modules = [name for name in SOURCES if under(name, "partitioner.planner")]
    code = f"import sys, {', '.join(modules)}; print(*(m for m in ('torch', 'passes') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
