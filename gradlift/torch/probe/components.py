"""The components of all graphs that a probe has met.

Several graphs may be armed during one probe (micro-batches, two networks that train against
each other), and several ranks may put theirs together. Their components are joined by the keys they
share, so that one plan fits all. A component goes by a number that it was given when it was met;
those joined since have one root.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradlift.plan.disjoint_sets import DisjointSets


class Components:
    """Components, the keys of the cuts that lead into them, and what is known of them."""

    def __init__(self) -> None:
        self._sets = DisjointSets()
        self.loss = self._sets.add()
        """The loss's; always its own root."""
        self._of_key: dict[str, int] = {}
        self._held: set[int] = set()
        self._roots: list[int] | None = None

    def enter(self, keys: Iterable[str], known: int | None = None) -> int:
        """The number of a component that cuts with these keys lead into.

        Args:
            keys: what other components they lead into become part of this one.
            known: its number, if it has one.
        """
        self._roots = None
        for key in keys:
            own = self._of_key.get(key)
            if own is None:
                own = self._of_key[key] = self._sets.add()
            known = own if known is None else known
            self._sets.join(known, own)
        return self._sets.add() if known is None else known

    def hold(self, component: int) -> None:
        """It runs at the global scale."""
        self._held.add(component)

    # All of them together, by root.

    @property
    def roots(self) -> list[int]:
        """The root of each number."""
        if self._roots is None:
            self._roots = self._sets.roots()
        return self._roots

    def indices(self) -> dict[int, int]:
        """The place of each root in the order of the survey's graph, the loss's first."""
        return {root: n for n, root in enumerate(sorted(set(self.roots)))}

    def keys(self) -> dict[int, list[str]]:
        """The keys of the cuts that lead into each."""
        roots = self.roots
        keys: dict[int, list[str]] = {root: [] for root in sorted(set(roots))}
        for key, own in self._of_key.items():
            keys[roots[own]].append(key)
        return keys

    def first_keys(self) -> dict[int, str | None]:
        """One of the keys of each; None for the loss's."""
        found = {root: next(iter(keys), None) for root, keys in self.keys().items()}
        return {**found, self.loss: None}

    def held(self) -> set[int]:
        """Those that run at the global scale."""
        return {self.roots[component] for component in self._held}
