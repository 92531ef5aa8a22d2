"""The type checker of a Program: invariants that every pass must leave behind."""

from __future__ import annotations

from torch import fx

from partitioner.errors import PassError
from partitioner.printer import neighbourhood
from partitioner.program import Program, node_info


def _fail(node: fx.Node, rule: str) -> PassError:
    return PassError(f"{node.name}: {rule}\n{neighbourhood(node)}")


def verify(program: Program) -> None:
    """Check a program.

    1. The graph is well formed: arguments are defined before use, names are unique, one output at the end.
    2. Every ``get_attr`` names a parameter or buffer of the tables, by its canonical name, once.
    3. Every parameter that a node reads is in the table, and windows do not run backwards.

    Raises:
        PassError: with the node and its neighbours.
    """
    tables = {info.name for info in (*program.parameters, *program.buffers)}
    seen: set[str] = set()
    window = -1
    outputs = 0
    for node in program.graph.graph.nodes:
        if node.op == "get_attr":
            target = str(node.target)
            if target not in tables:
                raise _fail(node, f"{target!r} is not the name of a parameter or buffer")
            if target in seen:
                raise _fail(node, f"{target!r} is read by two get_attr nodes")
            seen.add(target)
        outputs += node.op == "output"
        info = node_info(node)
        for parameter in info.reads:
            if parameter not in tables:
                raise _fail(node, f"reads {parameter!r}, which is not in the parameter table")
        if node.op == "call_function" and info.atom >= 0:
            if info.atom < window:
                raise _fail(node, f"runs in window {info.atom} after window {window}")
            window = info.atom
    if outputs != 1:
        raise PassError(f"the graph has {outputs} outputs; it must have one")
    try:
        program.graph.graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"the graph is broken: {error}") from error
