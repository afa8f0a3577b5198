"""Cost of the health of checkpoints: the check of tensors while they are hashed, and the watch of metrics."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import machine
import torch
from rich.console import Console
from rich.table import Table

from holdfast.checkpoint.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.checkpoint.format.layout import Shard, lay_out
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.store import open_store
from holdfast.system.rawbytes import view_bytes
from holdfast.watch.spike import Spike
from holdfast.watch.values import ContentCheck

HERE = Path(__file__).resolve().parent
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
}
TENSOR_BYTES = 8 << 20
VALUES = 100_000
STEP_S = 0.01
"""Duration of a step, which the share of the watch is computed for."""
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="size of a data file")
    parser.add_argument("--dir", help="folder on the disk that is written to")
    parser.add_argument("--out", type=Path, help="default results/healthy_<hardware>_<date>.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checks = {dtype: _check_gbps(_image(dtype, options.mib), options.rounds) for dtype in DTYPES}
    durable = _durable_s(_image("F32", options.mib), options.rounds, options.dir)
    watch_s = _watch_s()
    return _report(options, checks, durable, watch_s)


def _image(dtype: str, mib: int) -> memoryview:
    """Return a data file of tensors of one dtype."""
    torch_dtype = getattr(torch, DTYPES[dtype])
    number = TENSOR_BYTES // torch_dtype.itemsize
    shards = [Shard.whole(f"model.{i}", dtype, (number,)) for i in range((mib << 20) // TENSOR_BYTES)]
    layout = lay_out(shards, 0)
    image = torch.empty(layout.file_bytes, dtype=torch.uint8)
    image[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    values = torch.randn(number).to(torch_dtype).view(torch.uint8)
    for start in layout.starts:
        image[start : start + TENSOR_BYTES] = values
    return memoryview(view_bytes(image))


def _check_gbps(image: memoryview, rounds: int) -> dict[str, float]:
    """Return the rates of hashing alone, and with the check, in GB per second of processor time."""

    def with_check() -> None:
        check = ContentCheck(image)
        hash_chunks(image, chunk_bytes_for(len(image)), on_hashed=check.add)
        assert check.result().num_bad == 0

    plain, checked = [], []
    for _ in range(rounds):
        plain.append(_cpu_s(lambda: hash_chunks(image, chunk_bytes_for(len(image)))))
        checked.append(_cpu_s(with_check))
    rates = {"hash": statistics.median(plain), "hash and check": statistics.median(checked)}
    return {name: len(image) / 1e9 / seconds for name, seconds in rates.items()}


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _durable_s(image: memoryview, rounds: int, folder: str | None) -> dict[str, list[float]]:
    """Return the seconds until a file is durable, without and with the check, in turns."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds + 1):
        for kind in sorted(found, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(dir=folder) as home:
                store = open_store(home)
                began = time.perf_counter()
                if kind == "with":
                    persist(store, "data", image, on_hashed=ContentCheck(image).add)
                else:
                    persist(store, "data", image)
                found[kind].append(time.perf_counter() - began)
    return {kind: seconds[1:] for kind, seconds in found.items()}  # the first of each warms up


def _watch_s() -> float:
    """Return the processor time of watching a loss and a norm, in seconds per step."""
    watch, generator = Spike(), random.Random(0)
    watch.begin(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    rows = [{"loss": generator.gauss(2, 0.1), "grad_norm": generator.gauss(1, 0.1)} for _ in range(VALUES)]
    began = time.process_time()
    for step, row in enumerate(rows):
        watch.recorded(step, row)
    return (time.process_time() - began) / VALUES


def _report(
    options: argparse.Namespace,
    checks: dict[str, dict[str, float]],
    durable: dict[str, list[float]],
    watch_s: float,
) -> int:
    table = Table("", "hash", "hash and check")
    for dtype, rates in checks.items():
        table.add_row(dtype, *(f"{rate:.1f} GB/s" for rate in rates.values()))
    console.print(table)
    for kind, seconds in durable.items():
        shown = f"{min(seconds):.3f} to {max(seconds):.3f}"
        console.print(f"durable {kind} the check: {statistics.median(seconds):.3f} s [{shown}]")
    console.print(f"watch of two metrics: {1e6 * watch_s:.1f} us, {watch_s / STEP_S:.3%} of a step of 10 ms")
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("healthy", facts)
    document = {
        "machine": facts,
        "mib": options.mib,
        "checks": checks,
        "durable_s": durable,
        "watch_s": watch_s,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
