"""Watch of finite values: each data file checked and summed up block by block, all ranks judged. No torch.

One dot product of a block with itself is both: its sum of squares, and finite only if every element is. So
the check is one pass over memory that the hash has just brought into the cache.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import median
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct
from typing_extensions import override

from holdfast.checkpoint.format.hashes import CACHED_BYTES
from holdfast.checkpoint.format.layout import header_bytes, parse_header
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperWatch, PersistedSave
from holdfast.checkpoint.watch import ActionWatch
from holdfast.errors import Corrupt
from holdfast.system.documents import Count, read_as, to_plain


@dataclass
class FiniteValues(ActionWatch):
    """Check of each checkpoint: all tensors are finite, and their norms are within reason.

    It takes place in the keeper, while the tensors are hashed. A checkpoint that does not pass is marked as
    unhealthy; see `Checkpointer.restore`.

    Args:
        action: "mark" the checkpoint; "off" to check nothing.

    Raises:
        InvalidInput: `action` is something else.
    """

    name: ClassVar[str] = "finite-values"
    keeper: ClassVar[str | None] = "holdfast.watch.values:ValuesKeeper"

    actions: ClassVar[tuple[str, ...]] = ("mark", "off")
    action: str = "mark"


MAX_NAMES = 8  # tensors that are named in a part; the others are only counted
MAX_BEFORE = 8
"""Checkpoints before whose norms are kept, so that the next attempt has something to compare with."""
_MIN_BEFORE = 3  # checkpoints that a norm is compared with, at least
_MAX_GROWTH = 10.0
"""A norm of parameters this many times as large, or as small, as before is not within reason."""
_MAX_MOMENT_GROWTH = 100.0  # the same for norms of an optimizer's state, which follow the gradients
_Square = Annotated[float, Meta(ge=0)] | None


class Squares(Struct, frozen=True):
    """Sums of squares of floating-point tensors; None where there are none, or they overflow."""

    parameters: _Square = None
    moments: _Square = None  # of optimizers


class TensorHealth(Struct, frozen=True):
    """Health of the tensors in one data file."""

    num_bad: Count  # tensors with a NaN, or with an infinity that is not part of a mask
    bad: Annotated[tuple[str, ...], Meta(max_length=MAX_NAMES)]  # names of the first of them
    squares: Squares  # sums of squares of this rank's shards


_BLOCK_BYTES = CACHED_BYTES  # bytes that are checked at once
_MOMENT = re.compile(r"(?:^|\.)state\.")
_TRAINED = re.compile(r"(?:^|\.)(?:weight|bias)$")  # usual names of parameters. Masks have others
_STEP = re.compile(r"\.step(?:@r\d+)?$")
_SMALL = {  # dtype -> mask, largest finite value of the masked bits
    "F16": (0x7FFF, 0x7BFF),
    "F8_E4M3": (0x7F, 0x7E),
    "F8_E5M2": (0x7F, 0x7B),
    "F8_E8M0": (0xFF, 0xFE),
}
_LONE_NAN = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")  # 0x80 is their only value that is not finite
_NUMPY_NAMES = {"F64": "<f8", "F32": "<f4", "C64": "<f4", "F16": "<f2"}
_MEASURED = ("F64", "F32", "BF16", "C64")
_FLOATS = (*_MEASURED, *_SMALL, *_LONE_NAN)


class _Tensor(Struct, frozen=True):
    """One floating-point tensor of a file."""

    name: str
    start: int
    stop: int
    dtype: str
    is_moment: bool
    is_summed: bool

    @property
    def purpose(self) -> tuple[str, bool, bool]:
        """Its dtype and what is computed of it."""
        return self.dtype, self.is_moment, self.is_summed


_Run = tuple[_Tensor, ...]  # neighbours in the file with one dtype and purpose, checked together


class ContentCheck:
    """Check of one data file, fed with its bytes in any order, each once.

    Infinities are allowed in a tensor whose other elements are all 0: attention masks and limits that are not
    set yet look like this. They are not allowed in an optimizer's tensors, and in the parameters that these
    are about or that have the usual names.
    """

    def __init__(self, image: memoryview) -> None:
        self._runs = _runs_of(bytes(image[: header_bytes(image)]))
        self._starts = [run[0].start for run in self._runs]
        self._sums = [0.0, 0.0]  # of parameters, of moments
        self._has_nan: dict[_Tensor, bool] = {}  # tensors with an element that is not finite
        self._image = image
        self._moments = [one.name for run in self._runs for one in run if one.is_moment]

    def add(self, start: int, stop: int) -> None:
        """Check the elements in a range of the file that does not cut an element."""
        for run in self._runs[max(0, bisect_right(self._starts, start) - 1) :]:
            if run[0].start >= stop:
                return
            for at in range(max(start, run[0].start), min(stop, run[-1].stop), _BLOCK_BYTES):
                end = min(at + _BLOCK_BYTES, stop, run[-1].stop)
                square = _square(self._image[at:end], run[0].dtype)
                if square is None:
                    square = self._look_closely(run, at, end)
                if run[0].is_summed:
                    self._sums[run[0].is_moment] += square

    def _look_closely(self, run: _Run, start: int, stop: int) -> float:
        """Find the tensors of a block that are not finite. Return the sum of squares of finite elements."""
        total = 0.0
        for tensor in run[bisect_right(run, start, key=lambda tensor: tensor.start) - 1 :]:
            if tensor.start >= stop:
                break
            values = _as_doubles(self._image[max(start, tensor.start) : min(stop, tensor.stop)], tensor.dtype)
            num_nan, num_infinite, square = _count(values)
            total += square
            if num_nan or num_infinite:
                self._has_nan[tensor] = self._has_nan.get(tensor, False) or num_nan > 0
        return total

    def result(self) -> TensorHealth:
        """Return the health of the tensors, after all bytes were added."""
        bad = [one.name for one, has_nan in self._has_nan.items() if has_nan or not self._is_mask(one)]
        summed = {run[0].is_moment for run in self._runs if run[0].is_summed}
        parameters, moments = (
            total if is_moment in summed and math.isfinite(total) else None
            for is_moment, total in enumerate(self._sums)
        )
        return TensorHealth(len(bad), tuple(bad[:MAX_NAMES]), Squares(parameters, moments))

    def _is_mask(self, tensor: _Tensor) -> bool:
        """Return True if only infinities differ from 0, in a tensor that is not trained."""
        is_trained = _TRAINED.search(tensor.name) or any(f".{tensor.name}." in name for name in self._moments)
        if tensor.is_moment or is_trained:
            return False
        blocks = range(tensor.start, tensor.stop, _BLOCK_BYTES)
        return all(
            _count(_as_doubles(self._image[at : min(at + _BLOCK_BYTES, tensor.stop)], tensor.dtype))[2] == 0.0
            for at in blocks
        )


@lru_cache(maxsize=4)
def _runs_of(header: bytes) -> tuple[_Run, ...]:
    """Return the floating-point tensors of a file in their order, neighbours together."""
    entries, data_at = parse_header(header, "a staged file")
    found: list[_Tensor] = []
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] in _FLOATS:
            start, stop = entry["data_offsets"]
            is_moment = bool(_MOMENT.search(name))
            is_summed = entry["dtype"] in _MEASURED and not (is_moment and _STEP.search(name))
            found.append(_Tensor(name, data_at + start, data_at + stop, entry["dtype"], is_moment, is_summed))
    runs: list[list[_Tensor]] = []
    for tensor in sorted(found, key=lambda tensor: tensor.start):
        if tensor.start == tensor.stop:
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and (last.stop, last.purpose) == (tensor.start, tensor.purpose):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return tuple(map(tuple, runs))


@cache
def _numpy() -> Any:
    """Import numpy, with one thread: a keeper must not compete with the training for cores."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    import numpy

    return numpy


def _square(block: memoryview, dtype: str) -> float | None:
    """Return the sum of squares of a block; None if an element is not finite, or the sum overflows."""
    numpy = _numpy()
    with numpy.errstate(all="ignore"):
        if dtype in _SMALL:
            mask, largest = _SMALL[dtype]
            bits = numpy.frombuffer(block, "<u2" if dtype == "F16" else "u1")
            return 0.0 if int((bits & mask).max()) <= largest else None
        if dtype in _LONE_NAN:
            return None if bool((numpy.frombuffer(block, "u1") == 0x80).any()) else 0.0
        if dtype == "BF16":
            found = sum(float(numpy.dot(half, half)) for half in _halves(block))
        else:
            values = numpy.frombuffer(block, _NUMPY_NAMES[dtype])
            found = float(numpy.dot(values, values))
    return found if math.isfinite(found) else None


def _halves(block: memoryview) -> Iterator[Any]:
    """Yield the even and the odd elements of a block of bfloat16 as float32."""
    numpy = _numpy()
    if len(block) % 4:
        yield (numpy.frombuffer(block[-2:], "<u2").astype("<u4") << 16).view("<f4")
        block = block[:-2]
    pairs = numpy.frombuffer(block, "<u4")
    yield (pairs << 16).view("<f4")
    yield (pairs & 0xFFFF0000).view("<f4")


def _as_doubles(block: memoryview, dtype: str) -> Any:
    """Return the elements of a block as float64; those of small types as 1, NaN and infinity."""
    numpy = _numpy()
    with numpy.errstate(all="ignore"):  # a signalling NaN
        if dtype == "BF16":
            return (numpy.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4").astype("<f8")
        if dtype in _NUMPY_NAMES:
            return numpy.frombuffer(block, _NUMPY_NAMES[dtype]).astype("<f8")
    bits = numpy.frombuffer(block, "u1")
    if dtype in _LONE_NAN:
        return numpy.where(bits == 0x80, numpy.nan, bits != 0)
    mask, largest = _SMALL[dtype]
    masked = bits & mask
    infinite = (masked == 0x7C) & (dtype == "F8_E5M2")
    return numpy.where(infinite, numpy.inf, numpy.where(masked > largest, numpy.nan, masked != 0))


def _count(values: Any) -> tuple[int, int, float]:
    """Return the numbers of NaNs and of infinities, and the finite sum of squares."""
    numpy = _numpy()
    finite = values[numpy.isfinite(values)]
    num_nan = int(numpy.isnan(values).sum())
    with numpy.errstate(all="ignore"):
        return num_nan, len(values) - len(finite) - num_nan, float(numpy.dot(finite, finite))


def judge(tensors: Iterable[TensorHealth | None], before: Sequence[Squares] = ()) -> Section:
    """Return the section of a manifest, from the values of each rank, None if they were not checked.

    Its mark is FOR only if the norms could be compared with those of the checkpoints before that were not
    unhealthy, oldest first, and are within reason.
    """
    found = list(tensors)
    checked = [one for one in found if one is not None]
    squares = Squares(
        _total(one.squares.parameters for one in checked), _total(one.squares.moments for one in checked)
    )
    data = {"squares": to_plain(squares), "before": list(map(to_plain, before))}
    against = (*not_finite(checked), *_out_of_reason(squares, before))
    if against:
        return Section(_VERSION, data, Mark.AGAINST, against)
    if len(checked) < len(found):
        return Section(_VERSION, data, Mark.UNSURE, (NOT_CHECKED,))
    known = [one for one in before if one.parameters]
    can_compare = squares.parameters is not None and len(known) >= _MIN_BEFORE
    mark = Mark.FOR if can_compare else Mark.NONE
    return Section(_VERSION, data, mark, ("all tensors are finite",))


NOT_CHECKED = "the tensors were not checked: numpy is not installed"


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the ranks' sums; None if none has one, or it overflows."""
    known = [value for value in values if value is not None]
    total = math.fsum(known) if known else math.inf
    return total if math.isfinite(total) else None


def not_finite(checked: Iterable[TensorHealth]) -> list[str]:
    """Return a reason that names the first tensors that are not finite, if there are any."""
    checked = list(checked)
    names = [name for one in checked for name in one.bad][:MAX_NAMES]
    num_bad = sum(one.num_bad for one in checked)
    if not num_bad:
        return []
    more = f" and {num_bad - len(names)} more" if num_bad > len(names) else ""
    return [f"NaN or infinity in {', '.join(name[:100] for name in names)}{more}"]


def _out_of_reason(squares: Squares, before: Sequence[Squares]) -> Iterator[str]:
    """Yield the norms that differ too much from those before."""
    for name, now, earlier, limit in (
        ("parameters", squares.parameters, [one.parameters for one in before], _MAX_GROWTH),
        ("optimizer state", squares.moments, [one.moments for one in before], _MAX_MOMENT_GROWTH),
    ):
        known = [value for value in earlier if value is not None]
        usual = math.sqrt(median(known)) if len(known) >= _MIN_BEFORE else 0.0
        if now is None or usual == 0.0:
            continue
        ratio = math.sqrt(now) / usual
        if ratio > limit or (name == "parameters" and ratio < 1 / limit):
            yield f"the norm of the {name} is {math.sqrt(now):.4g}, usually {usual:.4g}"


_WHAT = "the section of finite values"
_MAX_NAME_CHARS = 1 << 14
_VERSION = 1


class _Judged(Struct, frozen=True):
    """Section of a manifest: the sums of squares of its checkpoint, and of those before, oldest first."""

    squares: Squares
    before: Annotated[tuple[Squares, ...], Meta(max_length=MAX_BEFORE)]


class ValuesKeeper(KeeperWatch):
    """Check of the tensors in each data file, and of their norms in each checkpoint."""

    _check: ContentCheck | None = None

    @override
    def persisting(self, image: memoryview) -> Callable[[int, int], None] | None:
        self._check = None
        if importlib.util.find_spec("numpy") is None:  # which the check needs
            return None
        try:
            self._check = ContentCheck(image)
        except Corrupt:  # it is saved as it was staged, and a restore reports it
            return None
        return self._check.add

    @override
    def persisted(self, save: PersistedSave) -> Section | None:
        if self._check is None:
            return Section(_VERSION, {}, Mark.UNSURE, (NOT_CHECKED,))
        found, self._check = self._check.result(), None  # which holds the memory of the save
        data = {**to_plain(found), "bad": [name[:_MAX_NAME_CHARS] for name in found.bad]}
        mark = Mark.AGAINST if found.num_bad else Mark.NONE
        return Section(_VERSION, data, mark, tuple(not_finite([found])))

    @override
    def committing(self, save: CompleteSave) -> Section | None:
        tensors: list[TensorHealth | None] = []  # None if those of a rank were not checked
        for section in map(save.sections.get, range(save.world_size)):
            if section is None or section.version != _VERSION or not section.data:
                tensors.append(None)
            else:
                tensors.append(read_as(TensorHealth, dict(section.data), _WHAT))
        before: tuple[Squares, ...] = ()  # of the newest checkpoints that were not unhealthy, oldest first
        if save.base is not None and save.base.version == _VERSION:
            base = read_as(_Judged, dict(save.base.data), _WHAT)
            own = () if save.is_base_healthy is False else (base.squares,)
            before = (*base.before, *own)[-MAX_BEFORE:]
        return judge(tensors, before)
