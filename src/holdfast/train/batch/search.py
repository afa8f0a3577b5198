"""Which batch size to try next, from what earlier ones left free; pure, so that all ranks search alike."""

from __future__ import annotations

from typing import final

_PRECISION = 0.03
_STRAIGHT = 0.01


@final
class Search:
    """Looks for the largest size that fits, in few tries, hardly ever with one that does not.

    Peak memory grows in a straight line with the batch once activations outgrow what the optimizer's step
    needs. So sizes double until three lie on a line, then one goes to where the line ends. What is not on a
    line is found by halving.

    Args:
        start: the size to try first.
        least: no smaller size is tried.
        most: no larger size is tried.
        slope: bytes per sample, if known from elsewhere.
    """

    def __init__(
        self, *, start: int = 1, least: int = 1, most: int = 4096, slope: float | None = None
    ) -> None:
        self._next = max(least, min(start, most))
        self._least = least
        self._most = most
        self._hint = slope
        self._rooms: dict[int, int] = {}
        self._too_large: int | None = None
        self._num_failed = 0

    @property
    def largest(self) -> int:
        """The largest size that has been seen to fit; 0 if none has."""
        return max(self._rooms, default=0)

    @property
    def slope(self) -> float | None:
        """Bytes that one more sample takes, by the last two sizes; as given, while there are none."""
        sizes = sorted(self._rooms)[-2:]
        if len(sizes) < 2:
            return self._hint
        return (self._rooms[sizes[0]] - self._rooms[sizes[1]]) / (sizes[1] - sizes[0])

    def tell(self, size: int, room: int | None) -> None:
        """What became of a try.

        Args:
            size: what was tried.
            room: bytes that were left free at the peak, negative if it was too much, or None if it failed.
        """
        if room is None or room < 0:
            self._too_large = min(size, self._too_large or size)
            self._num_failed += 1
        else:
            self._rooms[size] = room

    def next(self) -> int | None:
        """The size to try next; None when `largest` is within 3 % of the largest that fits."""
        if not self._rooms:
            return self._below_first()
        low, high = self.largest, min(self._too_large or self._most + 1, self._most + 1)
        if high - 1 <= low * (1 + _PRECISION):
            return None
        reach, is_sure = self._reach(low)
        if is_sure and reach <= low * (1 + _PRECISION):
            return None
        if not is_sure or reach >= high:  # a line that leads past what failed is none
            reach = 2 * low if self._too_large is None and not is_sure else min(reach, (low + high) // 2)
        return max(low + 1, min(reach, high - 1))

    def _below_first(self) -> int | None:
        """Nothing has fitted yet: the first try, then a little less, then half."""
        if self._too_large is None:
            return self._next
        if self._too_large == self._least:
            return None
        return max(self._least, int(self._too_large * (0.9 if self._num_failed == 1 else 0.5)))

    def expected_room(self, size: int) -> int | None:
        """Bytes that `size` is expected to leave free, by the line so far; None if there is none."""
        slope = self.slope
        if slope is None or not self._rooms:
            return None
        low = self.largest
        return int(self._rooms[low] - slope * (size - low))

    def _reach(self, low: int) -> tuple[int, bool]:
        """The largest size that should fit, and whether a line says so."""
        slope = self.slope
        if slope is None:
            return 2 * low, False
        if slope <= 0:
            return 2 * low, False
        return low + int(self._rooms[low] / slope), self._is_straight()

    def _is_straight(self) -> bool:
        sizes = sorted(self._rooms)[-3:]
        if len(sizes) < 3:
            return self._hint is not None
        first, second, third = sizes
        rooms = [self._rooms[size] for size in sizes]
        whole = (rooms[0] - rooms[2]) / (third - first)
        last = (rooms[1] - rooms[2]) / (third - second)
        return abs(last - whole) <= _STRAIGHT * abs(whole)
