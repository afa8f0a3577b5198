"""Tensors that were written during a copy; the next saves copy them before returning. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_FIRST_SAVES = 8
_MAX_SAVES = 1 << 20


class Repeats:
    """Chooses the tensors that the next save copies before it returns, after a torn copy.

    After a first tear these are the tensors that were written; if another save is torn meanwhile, all of
    them. This lasts for 8 saves, and after each further tear for twice as many: a loop that writes to tensors
    once is slowed down briefly, one that always does keeps its saves.
    """

    def __init__(self) -> None:
        self.num_torn = 0
        self._names: frozenset[str] = frozenset()
        self._are_all = False
        self._saves_left = 0

    def record_torn(self, names: Iterable[str]) -> None:
        """Count a torn save.

        Args:
            names: the tensors that were written during its copy.
        """
        if self._saves_left:
            self._are_all = True
        self._names |= frozenset(names)
        self._saves_left = min(_FIRST_SAVES << self.num_torn, _MAX_SAVES)
        self.num_torn += 1

    def record_torn_elsewhere(self) -> None:
        """Count a save that was torn on another rank; the next saves copy everything before returning.

        Otherwise each rank would be torn by itself at another save, and none of these would be complete.
        """
        self.record_torn(())
        self._are_all = True

    def record_saved(self) -> None:
        """Count a save that was not torn."""
        self._saves_left = max(0, self._saves_left - 1)
        if not self._saves_left:
            self._names, self._are_all = frozenset(), False

    def __contains__(self, name: str) -> bool:
        return self._are_all or name in self._names

    def __bool__(self) -> bool:
        return self._saves_left > 0
