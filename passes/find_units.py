"""Find what could be a gather unit, and cut the forward into the windows that plans are made of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

from partitioner.errors import PassError
from partitioner.pass_manager import Pass
from partitioner.program import Program, UnitGroup, node_info, update_info
from passes.module_runs import ROOT, Runs, find_runs, inside, owners

TINY_SHARE = 0.05  # an atom smaller than this share of its neighbour joins it: its own gather would be all latency
SPLIT_SHARE = 0.10  # a module outside any block is looked into if it holds more than this share of all parameters
MERGES = (2, 4)  # how many blocks in a row may form one unit


@dataclass
class _Tree:
    """The module tree with what each module owns."""

    program: Program
    runs: Runs
    owned: dict[str, list[str]] = field(default_factory=dict)  # module -> parameters it must hold
    pinned: list[tuple[str, ...]] = field(default_factory=list)  # module lists that must be units of their own
    children: dict[str, list[str]] = field(default_factory=dict)
    callable: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)

    def parameters_under(self, modules: tuple[str, ...]) -> list[str]:
        return [p for m, ps in self.owned.items() if any(inside(m, top) for top in modules) for p in ps]

    def size(self, modules: tuple[str, ...]) -> int:
        return sum(self.sizes[p] for p in self.parameters_under(modules))

    def is_pinned(self, module: str) -> bool:
        return any(inside(module, top) for group in self.pinned for top in group)

    def full_children(self, module: str) -> list[str]:
        """Children that hold parameters and are not pinned."""
        return [c for c in self.children.get(module, []) if self.size((c,)) and not self.is_pinned(c)]


def _parent(name: str, known: dict[str, None]) -> str:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ROOT


def _build_tree(program: Program, runs: Runs) -> _Tree:
    known = dict.fromkeys(m.name for m in program.modules)
    tree = _Tree(program, runs)
    tree.sizes = {p.name: p.nbytes for p in program.parameters}
    tree.callable = frozenset(m.name for m in program.modules if m.has_forward and runs.calls.get(m.name))
    for name in known:
        if name != ROOT:
            tree.children.setdefault(_parent(name, known), []).append(name)
    shared: dict[str, None] = {}
    for parameter, holders in owners(program, runs).items():
        if len(holders) > 1 and ROOT not in holders:
            _pin_together(tree, holders)
            tree.owned.setdefault(holders[0], []).append(parameter)
        else:
            holder = ROOT if len(holders) > 1 else holders[0]
            tree.owned.setdefault(holder, []).append(parameter)
            if holder != ROOT and len(runs.calls[holder]) > 1:
                shared.setdefault(_outermost_shared(tree, holder))
    for module in shared:
        if not tree.is_pinned(module):
            _pin_together(tree, (module,))
    return tree


def _outermost_shared(tree: _Tree, module: str) -> str:
    """The outermost module around ``module`` that runs as often as it does."""
    calls = len(tree.runs.calls[module])
    while (up := module.rpartition(".")[0]) and len(tree.runs.calls.get(up, ())) == calls:
        module = up
    return module


def _pin_together(tree: _Tree, modules: tuple[str, ...]) -> None:
    """Join ``modules`` with every pinned group they touch."""
    touching = [g for g in tree.pinned if any(inside(m, o) or inside(o, m) for m in modules for o in g)]
    joined = dict.fromkeys(m for group in (*touching, modules) for m in group)
    outer = [m for m in joined if not any(m != o and inside(m, o) for o in joined)]
    tree.pinned = [g for g in tree.pinned if g not in touching]
    tree.pinned.append(tuple(sorted(outer, key=lambda m: tree.runs.calls[m][0])))


def _find_blocks(tree: _Tree) -> list[str]:
    """Outermost modules that are numbered children of one parent, two or more with parameters."""
    blocks: dict[str, None] = {}
    for parent in [ROOT, *(m.name for m in tree.program.modules if m.name)]:
        if any(inside(parent, b) for b in blocks if parent):
            continue
        numbered = [c for c in tree.full_children(parent) if c.rpartition(".")[2].isdigit()]
        if len(numbered) > 1 and all(c in tree.callable and tree.runs.single(c) for c in numbered):
            blocks.update(dict.fromkeys(numbered))
    return list(blocks)


def _splits(tree: _Tree, module: str, blocks: list[str], total: int) -> bool:
    """Whether to look for atoms below a module."""
    if module not in tree.callable or not tree.runs.single(module):
        return True
    if any(b != module and inside(b, module) for b in blocks):
        return True
    children = tree.full_children(module)
    whole = (
        not tree.owned.get(module)
        and len(children) > 1
        and all(c in tree.callable and tree.runs.single(c) for c in children)
    )
    in_block = any(inside(module, b) for b in blocks)
    return whole and (module in blocks or (not in_block and tree.size((module,)) > SPLIT_SHARE * total))


def _find_atoms(tree: _Tree, blocks: list[str]) -> list[str]:
    """The finest modules that may be units; parameters of modules that were looked into become pinned units."""
    total = sum(tree.sizes.values())
    atoms, stack = [], [ROOT]
    while stack:
        module = stack.pop()
        if module != ROOT and not _splits(tree, module, blocks, total):
            atoms.append(module)
            continue
        if module != ROOT and tree.owned.get(module):
            tree.pinned.append((module,))
        stack.extend(reversed([c for c in tree.full_children(module) if not tree.is_pinned(c)]))
    return sorted(atoms, key=lambda m: tree.runs.calls[m][0])


def _join_tiny(tree: _Tree, atoms: list[str], blocks: list[str]) -> list[tuple[str, ...]]:
    """Neighbours in one block (or outside any) where one is tiny become one atom."""

    def home(module: str) -> str:
        return next((b for b in blocks if inside(module, b)), ROOT)

    groups: list[tuple[str, ...]] = []
    for atom in atoms:
        previous = groups[-1] if groups else None
        if previous and home(previous[0]) == home(atom) and atom not in blocks and previous[0] not in blocks:
            small, large = sorted((tree.size(previous), tree.size((atom,))))
            if small < TINY_SHARE * large:
                groups[-1] = (*previous, atom)
                continue
        groups.append((atom,))
    return groups


class _Windows:
    """Positions at which windows start."""

    def __init__(self, starts: dict[int, str]) -> None:
        self.starts = sorted(starts)
        self.names = [starts[s] for s in self.starts]

    def of(self, position: int) -> int:
        """The window that an operator runs in; what comes before the first start belongs to the first window."""
        low, high = 0, len(self.starts)
        while low < high:
            middle = (low + high) // 2
            if self.starts[middle] <= position:
                low = middle + 1
            else:
                high = middle
        return max(low - 1, 0)


def _make_windows(tree: _Tree, atoms: list[tuple[str, ...]]) -> _Windows:
    starts: dict[int, str] = {}
    for modules in atoms:
        starts[tree.runs.calls[modules[0]][0][0]] = max(modules, key=lambda m: tree.size((m,)))
    for group in tree.pinned:
        nested = any(m != o and inside(o, m) for m in group for (o, *_) in atoms)
        for module in () if nested else group:
            calls = tree.runs.calls[module]
            for n, (first, _) in enumerate(calls):
                starts.setdefault(first, f"{module}#{n}" if len(calls) > 1 else module)
    return _Windows(starts or {0: "model"})


def _pinned_groups(tree: _Tree, windows: _Windows) -> list[UnitGroup]:
    groups = []
    claimed: set[str] = set()
    for modules in sorted(tree.pinned, key=lambda g: (-min(m.count(".") for m in g), g)):
        nested = [p for other in tree.pinned if other != modules for p in _own_parameters(tree, other)]
        own = [p for p in _own_parameters(tree, modules) if p not in nested and p not in claimed]
        claimed.update(own)
        runs = sorted(run for m in modules for run in tree.runs.calls[m])
        if len(modules) > 1:
            runs = [(runs[0][0], runs[-1][1])]  # one list group: gathered at the first module, freed after the last
        calls = tuple((windows.of(a), windows.of(b)) for a, b in runs)
        groups.append(
            UnitGroup(name="+".join(modules), modules=modules, parameters=tuple(own), calls=calls, level="pinned")
        )
    root = tree.owned.get(ROOT, [])
    if root:
        span = ((0, len(windows.names) - 1),)
        groups.append(UnitGroup(name="(root)", modules=(ROOT,), parameters=tuple(root), calls=span, level="pinned"))
    return groups


def _own_parameters(tree: _Tree, modules: tuple[str, ...]) -> list[str]:
    """What a pinned group holds: everything below, unless atoms were found below it; then only its direct parameters."""
    looked_into = len(modules) == 1 and len(tree.runs.calls[modules[0]]) == 1
    if looked_into:
        return tree.owned.get(modules[0], [])
    return tree.parameters_under(modules)


def _chain_groups(tree: _Tree, atoms: list[tuple[str, ...]], blocks: list[str], windows: _Windows) -> list[UnitGroup]:
    groups: dict[tuple[int, int], UnitGroup] = {}

    def add(modules: tuple[str, ...], name: str, first: int, last: int, level: str) -> None:
        parameters = [p for p in tree.parameters_under(modules) if not _held_by_pinned(tree, p)]
        groups.setdefault(
            (first, last),
            UnitGroup(
                name=name, modules=modules, parameters=tuple(parameters), calls=((first, last),),
                level=level,  # type: ignore[arg-type]  # one of the literals, from the three calls below
            ),
        )  # fmt: skip

    spans: dict[str, tuple[int, int]] = {}
    for block in blocks:
        positions = [windows.of(tree.runs.calls[m][0][0]) for g in atoms for m in g if inside(m, block)]
        if positions:
            spans[block] = (min(positions), max(positions))
            add((block,), block, *spans[block], "block")
    for modules in atoms:
        window = windows.of(tree.runs.calls[modules[0]][0][0])
        add(modules, windows.names[window], window, window, "atom")
    by_parent: dict[str, list[str]] = {}
    for block in spans:
        by_parent.setdefault(block.rpartition(".")[0], []).append(block)
    for family in by_parent.values():
        for size in MERGES:
            for i in range(0, len(family) - size + 1, size):
                run = family[i : i + size]
                if all(spans[a][1] + 1 == spans[b][0] for a, b in itertools.pairwise(run)):
                    name = f"{run[0]}..{run[-1].rpartition('.')[2]}"
                    add(tuple(run), name, spans[run[0]][0], spans[run[-1]][1], "merge")
    covered = {w for first, last in groups for w in range(first, last + 1)}
    for window, name in enumerate(windows.names):
        if window not in covered:
            add((), f"({name})", window, window, "bare")
    return [groups[span] for span in sorted(groups)]


def _held_by_pinned(tree: _Tree, parameter: str) -> bool:
    return any(parameter in _own_parameters(tree, group) for group in tree.pinned)


@dataclass(frozen=True, kw_only=True)
class FindUnits(Pass):
    """Propose gather units and cut the forward into windows.

    1. Every parameter gets the module that must hold it (``module_runs.owners``); tied weights read in several modules,
       modules called several times, and parameters of modules that contain other units are *pinned* units.
    2. Blocks are the outermost numbered siblings (``layers.0``, ``layers.1``, ...). A block of several callable children
       is cut into them (*atoms*); other modules are cut while they hold a large share of the model.
    3. A tiny atom (a norm) joins its neighbour.
    4. A window begins where an atom, or a call of a pinned unit, begins. Candidates are atoms, whole blocks, and two or
       four blocks in a row.
    """

    name: ClassVar[str] = "find-units"

    def requires(self, program: Program) -> None:
        if not any(m.name == ROOT for m in program.modules):
            raise PassError(
                "find-units: the program has no root module", hint="capture fills Program.modules, root first"
            )

    def run(self, program: Program) -> bool:
        runs = find_runs(program)
        tree = _build_tree(program, runs)
        blocks = _find_blocks(tree)
        atoms = _join_tiny(tree, _find_atoms(tree, blocks), blocks)
        windows = _make_windows(tree, atoms)
        names = tuple(windows.names)
        groups = (*_chain_groups(tree, atoms, blocks, windows), *_pinned_groups(tree, windows))
        changed = names != program.windows or groups != program.groups
        program.windows, program.groups = names, groups
        for position, node in enumerate(runs.nodes):
            window = windows.of(position)
            if node_info(node).atom != window:
                update_info(node, atom=window)
                changed = True
        return changed
