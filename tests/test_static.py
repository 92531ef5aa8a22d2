"""The linters are part of the test suite, and so is the one command that runs it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FILE, LONGEST_FUNCTION = 500, 80  # lines; most are far below


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=lambda c: " ".join(c)
)
def test_is_clean(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _test_command() -> str:
    """The line of the README that sets up an environment and runs the tests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [line for line in text.splitlines() if line.startswith("python3 -m venv") and line.endswith("pytest")]
    assert len(found) == 1, f"README.md has {len(found)} lines from python3 -m venv to pytest; it must have one"
    return found[0]


def test_ci_runs_the_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert _test_command() in script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)


def test_every_dependency_is_pinned_once() -> None:
    names = re.findall(
        r'^  "([a-z0-9]+)[>=]', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    extras = re.findall(
        r"^(?:test|examples) = \[(.*)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    names += [name for extra in extras for name in re.findall(r'"([a-z0-9]+)[>=]', extra)]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert len(names) == 13  # 7 + 4 + 2
    assert set(names) <= set(pins)
    assert len(pins) == len(set(pins))
    assert all(re.fullmatch(r"[a-z0-9]+==[0-9.]+", line) for line in lines if not line.startswith("#"))


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            if path and "://" not in path and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in sorted(p for package in ("partitioner", "passes") for p in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") >= LONGEST_FILE:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert long == []
