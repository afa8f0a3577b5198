"""Products of matrices of integers, exact on every machine, computed on each core."""

from __future__ import annotations

import hashlib
import importlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.jobs.node.checks.result import Check

SIZE = 192
"""Rows and columns of the matrices for numpy."""
SMALL_SIZE = 40
"""Rows and columns of the matrices for Python itself."""
GREATEST = {"float64": 1 << 20, "float32": 200}
"""Greatest absolute value of an element, by type."""
GOLDEN = {
    (192, "float64"): "37c6e5f7ba63756e8203c7222e2ce8976dd91e71022d7d73ad3e71b183a90060",
    (192, "float32"): "b978112be0adaf8988a5c46d786da09119ad8177036bd8f6b36f36aa65428d19",
    (40, "float64"): "e7dc84911c552f707381cc54d070483d4f20f6fe6a111635b110756a215b0802",
}
"""Hashes of the products, by size and type: of 64-bit integers, by rows, the lowest byte first.

All sums stay below 2**53 in float64 and 2**24 in float32, so no order of additions rounds anything.
"""
_MASK = (1 << 32) - 1
_LIMIT_S = 1.0
"""Time limit for all cores. Those that come later are not tried."""

Products = Mapping[tuple[int, str], Callable[[], bytes]]
"""By size and type: computes a product, and returns it as 64-bit integers."""


def check_products(products: Products | None = None) -> Iterator[Check]:
    """Yield the result of products on each core that this process may run on.

    Args:
        products: the products to compute. Default: with numpy, or with Python itself.
    """
    chosen = products or numpy_products() or python_products()
    cores = sorted(os.sched_getaffinity(0))
    started_s = time.perf_counter()
    wrong: list[str] = []
    num_tried = 0
    try:
        for core in cores:
            if num_tried and time.perf_counter() - started_s > _LIMIT_S:
                break
            os.sched_setaffinity(0, {core})
            num_tried += 1
            wrong += [f"core {core} ({key[1]})" for key, one in chosen.items() if not is_right(key, one())]
    finally:
        os.sched_setaffinity(0, cores)
    took_s = time.perf_counter() - started_s
    values = {"cores": num_tried, "all_cores": len(cores), "products_s": took_s, "size": max(chosen)[0]}
    if not wrong:
        yield Check("product", f"{num_tried} of {len(cores)} cores", values=values)
        return
    trouble = f"a product of matrices of integers is wrong: {', '.join(wrong[:8])}"
    yield Check("product", "cores", trouble, stops=True, is_wrong=True, values=values)


def is_right(key: tuple[int, str], product: bytes) -> bool:
    """Return True for a right product."""
    return hashlib.sha256(product).hexdigest() == GOLDEN[key]


def elements(size: int, greatest: int, seed: int) -> list[int]:
    """Return the elements of a matrix by rows: integers between -greatest and greatest."""
    return [_mixed(index, seed, 1) % (2 * greatest + 1) - greatest for index in range(size * size)]


def exact_product(size: int, dtype: str) -> bytes:
    """Return a product that is computed with Python's integers."""
    left, right = (elements(size, GREATEST[dtype], seed) for seed in (1, 2))
    return _multiply(size, left, right)


def numpy_products() -> Products | None:
    """Return the products with numpy, and so with the vector units. None: it is not installed."""
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return None
    return {(SIZE, dtype): _with_numpy(numpy, dtype) for dtype in GREATEST}


def python_products() -> Products:
    """Return the product with Python's floating-point numbers."""
    left, right = ([float(one) for one in elements(SMALL_SIZE, GREATEST["float64"], seed)] for seed in (1, 2))
    return {(SMALL_SIZE, "float64"): lambda: _multiply(SMALL_SIZE, left, right)}


def _with_numpy(numpy: Any, dtype: str) -> Callable[[], bytes]:
    greatest, index = GREATEST[dtype], numpy.arange(SIZE * SIZE, dtype="uint64")
    one = numpy.uint64(1)
    left, right = (
        (_mixed(index, seed, one).astype("int64") % (2 * greatest + 1) - greatest)
        .astype(dtype)
        .reshape(SIZE, SIZE)
        for seed in (numpy.uint64(1), numpy.uint64(2))
    )
    return lambda: numpy.rint(left @ right).astype("<i8").tobytes()


def _mixed(index: Any, seed: Any, one: Any) -> Any:
    """Return well-mixed integers below 2**32, for Python's integers and numpy's alike.

    Args:
        one: the number 1 as one of these integers.
    """
    mask, high, low = _MASK * one, 15 * one, 13 * one
    mixed = ((index + one) * (2654435761 * one) + seed * (40503 * one)) & mask
    mixed = ((mixed ^ (mixed >> high)) * (2246822519 * one)) & mask
    return mixed ^ (mixed >> low)


def _multiply(size: int, left: list[Any], right: list[Any]) -> bytes:
    columns = [right[column::size] for column in range(size)]
    rows = [left[row * size : (row + 1) * size] for row in range(size)]
    found = [sum(a * b for a, b in zip(row, column, strict=True)) for row in rows for column in columns]
    return struct.pack(f"<{len(found)}q", *map(int, found))
