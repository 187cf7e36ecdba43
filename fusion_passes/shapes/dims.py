"""Symbolic dimensions: integer polynomials over named sizes, with floor division by a constant.

If two exporters compute a size in different ways (`2*((h-1)//2) + 2` and `Resize(Conv(x))`), the expressions are equal.
A fusion can thus compare shapes instead of the nodes that compute them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Atom:
    """An indivisible factor: a named size, or floor(`numerator` / `denominator`)."""

    name: str
    numerator: Dim | None = field(default=None, compare=False)
    denominator: int = field(default=1, compare=False)


Monomial = tuple[Atom, ...]
TRUNCATED = "trunc"  # begins the names of quotients of unknown sign


@dataclass(frozen=True)
class Dim:
    """A polynomial: the sum of coefficient x product of atoms. Terms are sorted, so equal sizes compare equal."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        total = dict(self.terms)
        for monomial, factor in other.terms:
            total[monomial] = total.get(monomial, 0) + factor
        return _dim(total)

    def __sub__(self, other: Dim) -> Dim:
        return self + other * constant(-1)

    def __mul__(self, other: Dim) -> Dim:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted(left + right, key=lambda atom: atom.name))
                total[monomial] = total.get(monomial, 0) + a * b
        return _dim(total)

    def __floordiv__(self, divisor: int) -> Dim:
        if divisor == 1:
            return self
        if self.value is not None:
            return constant(self.value // divisor)
        # floor((n*a + b) / n) = a + floor(b / n): only the remainder stays under the floor.
        quotient = _dim({monomial: factor // divisor for monomial, factor in self.terms})
        rest = _dim({monomial: factor % divisor for monomial, factor in self.terms})
        if not rest.terms:
            return quotient
        if rest.value is not None:  # 0 < rest < n
            return quotient
        unknown = [(monomial, factor) for monomial, factor in rest.terms if monomial]
        if len(unknown) == 1 and unknown[0][1] == 1 and len(unknown[0][0]) == 1:
            atom = unknown[0][0][0]
            if atom.numerator is not None:  # floor((c + floor(a/m)) / n) = floor((c*m + a) / (m*n))
                offset = dict(rest.terms).get((), 0) * atom.denominator
                return quotient + (atom.numerator + constant(offset)) // (atom.denominator * divisor)
        return quotient + _floor(rest, divisor)

    @property
    def value(self) -> int | None:
        """The size as an integer, or None if it has symbols."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def symbols(self) -> set[str]:
        """Return the names of all symbolic sizes, including those under a floor."""
        atoms = [atom for monomial, _ in self.terms for atom in monomial]
        return set().union(*({a.name} if a.numerator is None else a.numerator.symbols() for a in atoms), set())

    @property
    def lower_bound(self) -> int | None:
        """A lower bound if all named sizes are at least 1, or None if unknown."""
        total = 0
        for monomial, factor in self.terms:
            if factor < 0 and monomial:
                return None
            for atom in monomial:
                bound = 1 if atom.numerator is None else atom.numerator.lower_bound
                if atom.name.startswith(TRUNCATED) or bound is None or bound < 0:
                    return None
                factor *= bound // atom.denominator
            total += factor
        return total

    def evaluate(self, sizes: dict[str, int]) -> int:
        """Return the integer size for the given named sizes."""
        total = 0
        for monomial, factor in self.terms:
            for atom in monomial:
                numerator = None if atom.numerator is None else atom.numerator.evaluate(sizes)
                factor *= sizes[atom.name] if numerator is None else numerator // atom.denominator
            total += factor
        return total

    def __str__(self) -> str:
        if self.value is not None:
            return str(self.value)
        parts = ["*".join(([str(f)] if f != 1 or not m else []) + [a.name for a in m]) for m, f in self.terms]
        return " + ".join(parts)


def _dim(terms: dict[Monomial, int]) -> Dim:
    nonzero = [(monomial, factor) for monomial, factor in terms.items() if factor]
    return Dim(tuple(sorted(nonzero, key=lambda term: ([atom.name for atom in term[0]], term[1]))))


def _floor(numerator: Dim, denominator: int) -> Dim:
    return _dim({(Atom(f"floor(({numerator})/{denominator})", numerator, denominator),): 1})


@cache
def constant(value: int) -> Dim:
    """Return the dimension of integer size `value`."""
    return _dim({(): value})


@cache
def truncated(numerator: Dim, denominator: int) -> Dim:
    """Return a quotient rounded towards zero, whose numerator may be negative."""
    return _dim({(Atom(f"{TRUNCATED}(({numerator})/{denominator})"),): 1})


@cache
def symbol(name: str) -> Dim:
    """Return the dimension of the symbolic size `name`."""
    return _dim({(Atom(name),): 1})
