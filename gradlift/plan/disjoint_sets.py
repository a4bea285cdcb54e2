"""Disjoint sets of whole numbers: what belongs together, while that is still being found out."""

from __future__ import annotations


class DisjointSets:
    """Numbers from 0 on, each in one set; a set goes by its smallest number."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def add(self) -> int:
        """A new number, in a set of its own."""
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        """The smallest number of an item's set."""
        parent = self.parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        """Makes the sets of two numbers one."""
        a, b = self.find(a), self.find(b)
        if a < b:
            self.parent[b] = a
        else:
            self.parent[a] = b

    def roots(self) -> list[int]:
        """``find`` of every number, in their order."""
        roots: list[int] = []
        for item, parent in enumerate(self.parent):
            # A parent is smaller than its children.
            roots.append(item if parent == item else roots[parent])
        return roots
