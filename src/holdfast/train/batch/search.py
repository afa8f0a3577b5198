"""Search for the largest batch size that fits, with few attempts; pure, so all ranks search alike."""

from __future__ import annotations

from typing import final

_PRECISION = 0.03
_STRAIGHT = 0.01
_LEAP = 4


@final
class Search:
    """Search for the largest size that fits, in few attempts. They rarely run out of memory.

    Peak memory grows linearly with the batch once activations outgrow what the optimizer's step needs. So
    sizes grow in leaps until three of them lie on a line, then the search jumps to the end of that line.
    Where memory does not grow linearly, the search halves the interval.

    Args:
        start: the size to try first.
        slope: bytes per sample, if an estimate exists.
    """

    def __init__(
        self, *, start: int = 1, min_size: int = 1, max_size: int = 4096, slope: float | None = None
    ) -> None:
        self._next = max(min_size, min(start, max_size))
        self._min_size = min_size
        self._max_size = max_size
        self._estimated_slope = slope
        self._free_bytes: dict[int, int] = {}
        self._too_large: int | None = None
        self._num_failed = 0

    @property
    def largest(self) -> int:
        """The largest size that fitted so far, or 0."""
        return max(self._free_bytes, default=0)

    @property
    def slope(self) -> float | None:
        """Bytes per additional sample, from the last two sizes. With fewer sizes, the given estimate."""
        sizes = sorted(self._free_bytes)[-2:]
        if len(sizes) < 2:
            return self._estimated_slope
        return (self._free_bytes[sizes[0]] - self._free_bytes[sizes[1]]) / (sizes[1] - sizes[0])

    def record(self, size: int, free_bytes: int | None) -> None:
        """Record the outcome of an attempt.

        Args:
            free_bytes: bytes left free at the peak, negative beyond the limit, None if the attempt failed.
        """
        if free_bytes is None or free_bytes < 0:
            self._too_large = min(size, self._too_large or size)
            self._num_failed += 1
        else:
            self._free_bytes[size] = free_bytes

    def next(self) -> int | None:
        """Return the next size to try. None once `largest` is within 3 % of the optimum."""
        if not self._free_bytes:
            return self._next_before_first_fit()
        low, high = self.largest, min(self._too_large or self._max_size + 1, self._max_size + 1)
        if high - 1 <= low * (1 + _PRECISION):
            return None
        reach, is_linear = self._extrapolate(low)
        if is_linear and reach <= low * (1 + _PRECISION):
            return None
        if self._too_large is not None and (not is_linear or reach >= high):
            reach = min(reach, (low + high) // 2)  # a line that passes a failed size is wrong
        return max(low + 1, min(reach, high - 1))

    def _next_before_first_fit(self) -> int | None:
        """Return the first size, then a slightly smaller one, then half each time."""
        if self._too_large is None:
            return self._next
        if self._too_large == self._min_size:
            return None
        return max(self._min_size, int(self._too_large * (0.9 if self._num_failed == 1 else 0.5)))

    def expected_free_bytes(self, size: int) -> int | None:
        """Return the bytes that `size` should leave free, or None without an estimate."""
        slope = self.slope
        if slope is None or not self._free_bytes:
            return None
        low = self.largest
        return int(self._free_bytes[low] - slope * (size - low))

    def _extrapolate(self, low: int) -> tuple[int, bool]:
        """Return the largest size that should fit, and True if it follows from a line."""
        slope = self.slope
        if slope is None or slope <= 0:
            return 2 * low, False
        end = low + int(self._free_bytes[low] / slope)
        if self._estimated_slope is None and end > _LEAP * low:  # may still be the optimizer's step
            return _LEAP * low, False
        return end, self._is_linear()

    def _is_linear(self) -> bool:
        sizes = sorted(self._free_bytes)[-3:]
        if len(sizes) < 3:
            return self._estimated_slope is not None
        first, second, third = sizes
        free = [self._free_bytes[size] for size in sizes]
        whole = (free[0] - free[2]) / (third - first)
        last = (free[1] - free[2]) / (third - second)
        return abs(last - whole) <= _STRAIGHT * abs(whole)
