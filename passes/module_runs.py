"""Where each module of the tree runs in the graph, and which module may own each parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from partitioner.program import Program, node_info

ROOT = ""


def inside(name: str, module: str) -> bool:
    """Whether a dotted name is ``module`` or lies under it; everything lies under the root."""
    return module == ROOT or name == module or name.startswith(module + ".")


def prefixes(name: str) -> list[str]:
    """``"a.b.c"`` -> ``["a", "a.b", "a.b.c"]``; the root has none."""
    parts = name.split(".") if name else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def module_stack(program: Program, node: fx.Node, known: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """(FQN, call) of the modules whose forward runs a node, root first.

    Torch capture records the stack. A file format has only the innermost scope, so there the dotted prefixes are taken.
    """
    recorded = node.meta.get("module_stack")
    if recorded is not None:
        return tuple(recorded)
    info = node_info(node)
    return ((ROOT, 0), *((p, info.call) for p in prefixes(info.module) if p in known))


@dataclass(frozen=True)
class Runs:
    """Operators by position, and for every module the runs of positions of its calls."""

    nodes: tuple[fx.Node, ...]
    stacks: tuple[tuple[str, ...], ...]  # FQNs, one tuple a node
    calls: dict[str, tuple[tuple[int, int], ...]]  # (first, last) position of each call, in order

    def single(self, module: str) -> bool:
        """Called once, with no foreign operator in between."""
        runs = self.calls.get(module, ())
        if len(runs) != 1:
            return False
        first, last = runs[0]
        return all(module in self.stacks[i] for i in range(first, last + 1))


def operators(program: Program) -> tuple[fx.Node, ...]:
    """The nodes that compute something, in execution order."""
    return tuple(n for n in program.graph.graph.nodes if n.op in ("call_function", "call_method", "call_module"))


def find_runs(program: Program) -> Runs:
    """One walk over the graph."""
    known = frozenset(m.name for m in program.modules)
    nodes = operators(program)
    runs: dict[tuple[str, int], list[int]] = {}
    stacks = []
    for i, node in enumerate(nodes):
        stack = module_stack(program, node, known)
        stacks.append(tuple(name for name, _ in stack))
        for key in stack:
            span = runs.setdefault(key, [i, i])
            span[1] = i
    calls: dict[str, list[tuple[int, int]]] = {}
    for (name, _), (first, last) in runs.items():
        calls.setdefault(name, []).append((first, last))
    return Runs(nodes=nodes, stacks=tuple(stacks), calls={k: tuple(sorted(v)) for k, v in calls.items()})


@dataclass(frozen=True)
class Owners:
    """Which modules must hold each parameter, and which modules may therefore not be units."""

    holders: dict[str, tuple[str, ...]]
    """Parameter -> modules, in execution order; several only for a tied weight."""
    barred: frozenset[str]
    """Modules with a parameter in them that belongs further out: as units they would take it along."""


def owners(program: Program, runs: Runs) -> Owners:
    """For each parameter the modules that must hold it: for every reader, the deepest running module that contains it.

    FSDP2 gathers a unit's parameters around its modules' forward, so a parameter that is read outside its own module
    (``nn.MultiheadAttention`` reads ``out_proj`` itself) belongs to the module that reads it. A file format has no
    containment to respect: there the reader's own scope is the owner. A parameter that nothing reads belongs to the root.
    """
    by_name = program.source.kind != "onnx"
    found: dict[str, dict[str, None]] = {p.name: {} for p in program.parameters}
    aliases = {p.name: p.aliases for p in program.parameters}
    for node, stack in zip(runs.nodes, runs.stacks, strict=True):
        for parameter in node_info(node).reads:
            if parameter not in found:
                continue  # a buffer
            names = aliases[parameter]
            holder = next((m for m in reversed(stack) if not by_name or any(inside(a, m) for a in names)), ROOT)
            found[parameter].setdefault(holder)
    result = {}
    for parameter, holders in found.items():
        outer = [m for m in holders if not any(m != o and inside(m, o) for o in holders)]
        result[parameter] = tuple(outer) or (ROOT,)
    return _settle(program, runs, result) if by_name else Owners(result, frozenset())


def _settle(program: Program, runs: Runs, holders: dict[str, tuple[str, ...]]) -> Owners:
    """Move parameters outwards until no unit would take along what belongs further out."""
    known = {m.name for m in program.modules}
    homes = {
        p.name: [home for alias in p.aliases if (home := alias.rpartition(".")[0]) in known] for p in program.parameters
    }
    holders |= dict.fromkeys(_ties_for_root(program, holders, homes), (ROOT,))
    while True:
        barred = frozenset(
            module
            for name, tops in holders.items()
            for home in homes[name]
            for module in prefixes(home)
            if any(module != top and inside(module, top) for top in tops)
        )
        moved = {name: tops for name, tops in holders.items() if barred.intersection(tops)}
        if not moved:
            return Owners(holders, barred)
        for name, tops in moved.items():
            around = [m for m in prefixes(tops[0]) if m not in barred and m in runs.calls] if len(tops) == 1 else []
            holders[name] = (around[-1] if around else ROOT,)


def _ties_for_root(program: Program, holders: dict[str, tuple[str, ...]], homes: dict[str, list[str]]) -> list[str]:
    """Tied weights that only the root can hold.

    One with a name outside its holders (a head that forward does not call): the unit around that name would take it. One
    whose holder has more in it than the ties (a decoder that reads the table itself): all of that would be one unit.
    """
    below: Counter[str] = Counter()
    together: Counter[tuple[str, ...]] = Counter()
    for p in program.parameters:
        together[holders[p.name]] += p.nbytes
        for module in dict.fromkeys(m for home in homes[p.name] for m in prefixes(home)):
            below[module] += p.nbytes
    found = []
    for name, tops in holders.items():
        covered = all(any(inside(home, top) for top in tops) for home in homes[name])
        wide = len(tops) > 1 and any(below[top] > 2 * together[tops] for top in tops)
        if not covered or wide:
            found.append(name)
    return found
