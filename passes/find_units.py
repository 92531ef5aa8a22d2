"""Find what could be a gather unit, and cut the forward into the windows that plans are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from partitioner.errors import PassError, UnsupportedError
from partitioner.pass_manager import Pass
from partitioner.program import Program, TensorInfo, UnitGroup, node_info, update_info
from passes.module_runs import ROOT, Runs, find_runs, inside, owners, prefixes

TINY_SHARE = 0.05  # an atom smaller than this share of its neighbour joins it: its own gather would be all latency
SPLIT_SHARE = 0.10  # a module outside any block is looked into if it holds more than this share of all parameters
MERGES = (2, 4)  # how many blocks in a row may form one unit


@dataclass
class _Tree:
    """The module tree with what each module owns."""

    program: Program
    runs: Runs
    owned: dict[str, list[str]] = field(default_factory=dict)  # module -> parameters it must hold
    below: dict[str, list[str]] = field(default_factory=dict)  # module -> those of it and of every module in it
    pinned: list[tuple[str, ...]] = field(default_factory=list)  # module lists that must be units of their own
    children: dict[str, list[str]] = field(default_factory=dict)
    callable: frozenset[str] = frozenset()
    infos: dict[str, TensorInfo] = field(default_factory=dict)

    def own(self, module: str, parameter: str) -> None:
        self.owned.setdefault(module, []).append(parameter)
        for around in (ROOT, *prefixes(module)):
            self.below.setdefault(around, []).append(parameter)

    def parameters_under(self, modules: tuple[str, ...]) -> list[str]:
        """For modules of which none contains another."""
        return [p for module in modules for p in self.below.get(module, ())]

    def size(self, modules: tuple[str, ...]) -> int:
        return sum(self.infos[p].nbytes for p in self.parameters_under(modules))

    def dtypes(self, parameters: Iterable[str]) -> list[str]:
        """The dtypes that one unit of these parameters would reduce gradients of; FSDP2 takes one at most."""
        return sorted({self.infos[p].dtype for p in parameters if self.infos[p].trainable})

    def uniform(self, modules: tuple[str, ...]) -> bool:
        return len(self.dtypes(self.parameters_under(modules))) <= 1

    def is_pinned(self, module: str) -> bool:
        tops = {top for group in self.pinned for top in group}
        return any(around in tops for around in prefixes(module))

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
    tree.infos = {p.name: p for p in program.parameters}
    owned = owners(program, runs)
    tree.callable = frozenset(
        m.name for m in program.modules if m.has_forward and runs.calls.get(m.name) and m.name not in owned.barred
    )
    for name in known:
        if name != ROOT:
            tree.children.setdefault(_parent(name, known), []).append(name)
    shared: dict[str, None] = {}
    for parameter, holders in owned.holders.items():
        if len(holders) > 1 and ROOT not in holders:
            _pin_together(tree, holders)
            tree.own(holders[0], parameter)
        else:
            holder = ROOT if len(holders) > 1 else holders[0]
            tree.own(holder, parameter)
            if holder != ROOT and len(runs.calls[holder]) > 1:
                shared.setdefault(_outermost_shared(tree, holder))
    for module in shared:
        if not tree.is_pinned(module):
            _pin_together(tree, (module,))
    return tree


def _outermost_shared(tree: _Tree, module: str) -> str:
    """The outermost module around ``module`` that runs as often as it does and may be a unit."""
    calls = len(tree.runs.calls[module])
    found = module
    while module := module.rpartition(".")[0]:
        if module in tree.callable and len(tree.runs.calls[module]) == calls:
            found = module
        elif tree.runs.calls.get(module):
            break
    return found


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
    if len(tree.dtypes(tree.below[module])) > 1:
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
    total = sum(p.nbytes for p in tree.program.parameters)
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
            if small < TINY_SHARE * large and tree.uniform((*previous, atom)):
                groups[-1] = (*previous, atom)
                continue
        groups.append((atom,))
    return groups


def _absorb_tiny(tree: _Tree, atoms: list[tuple[str, ...]], blocks: list[str]) -> list[tuple[str, ...]]:
    """Tiny atoms outside any block that run between the modules of a tied group join it; the rest is returned.

    A final norm before a tied head is the usual one. The group is whole from its first module to its last in any case.
    """
    kept = []
    for atom in atoms:
        position = tree.runs.calls[atom[0]][0][0]
        for i, group in enumerate(tree.pinned):
            runs = [run for m in group for run in tree.runs.calls[m]]
            if (
                len(group) > 1
                and min(runs)[0] < position < max(runs)[0]
                and not any(inside(m, b) for m in atom for b in blocks)
                and tree.size(atom) < TINY_SHARE * tree.size(group)
                and tree.uniform((*group, *atom))
            ):
                tree.pinned[i] = tuple(sorted((*group, *atom), key=lambda m: tree.runs.calls[m][0]))
                break
        else:
            kept.append(atom)
    return kept


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
    for first, name in _root_reads(tree, atoms):
        starts.setdefault(first, name)
    return _Windows(starts or {0: "model"})


def _root_reads(tree: _Tree, atoms: list[tuple[str, ...]]) -> Iterator[tuple[int, str]]:
    """Calls of modules outside any atom that read what the root holds (a tied head): not to be lumped with their neighbour."""
    held = set(tree.owned.get(ROOT, ()))
    units = {m for modules in (*atoms, *tree.pinned) for m in modules}
    for position, node in enumerate(tree.runs.nodes):
        stack = tree.runs.stacks[position]
        if held.intersection(node_info(node).reads) and stack[-1] != ROOT and units.isdisjoint(stack):
            calls = tree.runs.calls[stack[-1]]
            n = next(i for i, (first, last) in enumerate(calls) if first <= position <= last)
            yield calls[n][0], f"{stack[-1]}#{n}" if len(calls) > 1 else stack[-1]


def _pinned_groups(tree: _Tree, windows: _Windows) -> list[UnitGroup]:
    groups = []
    for modules in sorted(tree.pinned, key=lambda g: (-min(m.count(".") for m in g), g)):
        runs = sorted(run for m in modules for run in tree.runs.calls[m])
        if len(modules) > 1:
            runs = [(runs[0][0], runs[-1][1])]  # one list group: gathered at the first module, freed after the last
        groups.append(
            UnitGroup(
                name="+".join(modules),
                modules=modules,
                parameters=tuple(_own_parameters(tree, modules)),
                calls=tuple((windows.of(a), windows.of(b)) for a, b in runs),
                level="pinned",
            )
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


def _merges(spans: dict[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Aligned runs of two and of four neighbouring blocks of one parent."""
    families: dict[str, list[str]] = {}
    for block in spans:
        families.setdefault(block.rpartition(".")[0], []).append(block)
    for family in families.values():
        for size in MERGES:
            for i in range(0, len(family) - size + 1, size):
                run = family[i : i + size]
                if all(spans[a][1] + 1 == spans[b][0] for a, b in itertools.pairwise(run)):
                    yield run


def _chain_groups(tree: _Tree, atoms: list[tuple[str, ...]], blocks: list[str], windows: _Windows) -> list[UnitGroup]:
    groups: dict[tuple[int, int], UnitGroup] = {}
    held = {p for group in tree.pinned for p in _own_parameters(tree, group)}

    def add(
        modules: tuple[str, ...], name: str, span: tuple[int, int], level: Literal["atom", "block", "merge"]
    ) -> None:
        parameters = [p for p in tree.parameters_under(modules) if p not in held]
        if level == "atom" or len(tree.dtypes(parameters)) <= 1:
            made = UnitGroup(name=name, modules=modules, parameters=tuple(parameters), calls=(span,), level=level)
            groups.setdefault(span, made)

    spans: dict[str, tuple[int, int]] = {}
    for block in blocks:
        positions = [windows.of(tree.runs.calls[m][0][0]) for g in atoms for m in g if inside(m, block)]
        if positions:
            spans[block] = (min(positions), max(positions))
            add((block,), block, spans[block], "block")
    for modules in atoms:
        window = windows.of(tree.runs.calls[modules[0]][0][0])
        add(modules, windows.names[window], (window, window), "atom")
    for run in _merges(spans):
        name = f"{run[0]}..{run[-1].rpartition('.')[2]}"
        add(tuple(run), name, (spans[run[0]][0], spans[run[-1]][1]), "merge")
    covered = {w for first, last in groups for w in range(first, last + 1)}
    for window, name in enumerate(windows.names):
        if window not in covered:
            bare = UnitGroup(name=f"({name})", modules=(), parameters=(), calls=((window, window),), level="bare")
            groups[window, window] = bare
    return [groups[span] for span in sorted(groups)]


def _refuse_mixed(tree: _Tree, groups: tuple[UnitGroup, ...]) -> None:
    for group in groups:
        dtypes = tree.dtypes(group.parameters)
        if len(dtypes) > 1:
            odd = next(p for p in group.parameters if tree.infos[p].trainable and tree.infos[p].dtype == dtypes[-1])
            raise UnsupportedError(
                f"{group.name} holds trainable parameters of {' and '.join(dtypes)} ({odd} is {dtypes[-1]}); "
                "FSDP2 takes one dtype in a unit",
                hint="build them in one dtype, or give the odd ones a module of their own",
            )


@dataclass(frozen=True, kw_only=True)
class FindUnits(Pass):
    """Propose gather units and cut the forward into windows.

    1. Every parameter gets the module that must hold it (``module_runs.owners``); tied weights read in several modules,
       modules called several times, and parameters of modules that contain other units are *pinned* units.
    2. Blocks are the outermost numbered siblings (``layers.0``, ``layers.1``, ...). A block of several callable children
       is cut into them (*atoms*); other modules are cut while they hold a large share of the model.
    3. A tiny atom (a norm) joins its neighbour, or the tied group that it runs within.
    4. A window begins where an atom, a call of a pinned unit, or a module that reads the root's parameters begins.
       Candidates are atoms, whole blocks, and two or four blocks in a row. Trainable parameters of two dtypes never share
       a unit.

    Raises UnsupportedError where one module mixes dtypes itself.
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
        atoms = _absorb_tiny(tree, _join_tiny(tree, _find_atoms(tree, blocks), blocks), blocks)
        windows = _make_windows(tree, atoms)
        names = tuple(windows.names)
        groups = (*_chain_groups(tree, atoms, blocks, windows), *_pinned_groups(tree, windows))
        _refuse_mixed(tree, groups)
        changed = names != program.windows or groups != program.groups
        program.windows, program.groups = names, groups
        for position, node in enumerate(runs.nodes):
            window = windows.of(position)
            if node_info(node).atom != window:
                update_info(node, atom=window)
                changed = True
        return changed
