"""A thin layer over MathOpt: linear expressions as dictionaries, so that rows are built in linear time and in one order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ortools.math_opt.python import mathopt

Variable: TypeAlias = mathopt.Variable
Row: TypeAlias = mathopt.LinearConstraint


@dataclass
class Expr:
    """``constant + sum(coefficient * variable)``."""

    constant: float = 0.0
    terms: dict[Variable, float] = field(default_factory=dict)

    def add(self, variable: Variable, coefficient: float = 1.0) -> Expr:
        if coefficient:
            self.terms[variable] = self.terms.get(variable, 0.0) + coefficient
        return self

    def add_all(self, variables: Iterable[Variable], coefficient: float = 1.0) -> Expr:
        for variable in variables:
            self.add(variable, coefficient)
        return self

    def plus(self, other: Expr, factor: float = 1.0) -> Expr:
        self.constant += factor * other.constant
        for variable, coefficient in other.terms.items():
            self.add(variable, factor * coefficient)
        return self


class Rows:
    """The MathOpt model under construction."""

    def __init__(self, name: str) -> None:
        self.model = mathopt.Model(name=name)
        self.num_constraints = 0
        self.num_variables = 0
        self._uses: dict[str, int] = {}

    def _unique(self, name: str) -> str:
        """MathOpt refuses two equal names."""
        uses = self._uses[name] = self._uses.get(name, 0) + 1
        return name if uses == 1 else f"{name}#{uses}"

    def binary(self, name: str) -> Variable:
        self.num_variables += 1
        variable: Variable = self.model.add_binary_variable(name=self._unique(name))
        return variable

    def continuous(self, name: str, *, lower: float = 0.0, upper: float = float("inf")) -> Variable:
        self.num_variables += 1
        variable: Variable = self.model.add_variable(lb=lower, ub=upper, name=self._unique(name))
        return variable

    def _row(self, expr: Expr, lower: float, upper: float, name: str) -> Row:
        row: Row = self.model.add_linear_constraint(lb=lower, ub=upper, name=self._unique(name))
        for variable, coefficient in expr.terms.items():
            row.set_coefficient(variable, coefficient)
        self.num_constraints += 1
        return row

    def at_most(self, expr: Expr, bound: float, name: str) -> Row:
        """expr <= bound."""
        return self._row(expr, -float("inf"), bound - expr.constant, name)

    def equal(self, expr: Expr, value: float, name: str) -> Row:
        """expr == value."""
        return self._row(expr, value - expr.constant, value - expr.constant, name)

    def minimize(self, expr: Expr) -> None:
        self.model.minimize(mathopt.LinearSum([c * v for v, c in expr.terms.items()]) + expr.constant)
