"""Uploads from an arena and verified reads into memory, beside the bare client doing the same."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import obstore
import torch
from goals import BUCKET_READS
from null_server import TILE
from rich.console import Console
from rich.table import Table

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.restore.fill import tensor_sink
from holdfast.checkpoint.restore.read import FileRead, Want, read
from holdfast.checkpoint.store.address import parse_address
from holdfast.checkpoint.store.bucket import READ_BYTES, ObjectStore
from holdfast.checkpoint.store.clients import Clients
from holdfast.system.units import format_bytes, parse_bytes

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.servers import ministack

HERE = Path(__file__).resolve().parent
UPLOAD_GOAL = 0.9
MEMORY_GOAL_BYTES = 64 << 20
NAME = names.data(1, 1, 0)


class Subject:
    """Subject of the transfers: an arena of incompressible bytes, and its hashes."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.arena = memoryview(mmap.mmap(-1, num_bytes))
        for start in range(0, num_bytes, len(TILE)):
            self.arena[start : start + len(TILE)] = TILE[: num_bytes - start]
        self.room = memoryview(mmap.mmap(-1, num_bytes))
        self.room[:] = self.arena  # every page is there before anything is measured
        self.tensor = torch.frombuffer(self.room, dtype=torch.uint8)
        self.address = parse_address(url)
        self.store = ObjectStore(self.address)
        self.client = Clients(self.address).get(retrying=True)
        chunk_bytes = chunk_bytes_for(num_bytes)
        self.file = DataFile(num_bytes, chunk_bytes, hash_chunks(self.arena, chunk_bytes))
        self.part = Part(
            *("bench", 1, 1, 0, 1, (), {}, ()), self.file, None, "", b"", b"[]", "", 0, "the benchmark's part"
        )

    def free(self) -> None:
        """Delete the object. The keeper verifies one that exists instead of sending it."""
        self.store.delete(NAME)

    def put(self) -> None:
        """Upload and hash at the same time, as the keeper does."""
        found = persist(self.store, NAME, self.arena)
        if found != self.file:
            message = "the hashes of the upload are not those of the arena"
            raise RuntimeError(message)

    def put_bare(self) -> None:
        """The bare client with the same parts, the same number at once, and the same signing."""
        obstore.put(
            self.client,
            self.address.key(NAME),
            self.arena,
            chunk_size=self.address.part_bytes,
            max_concurrency=self.address.parallel,
        )

    def read(self) -> None:
        """Read as a restore does: ranges, each chunk compared with its hash, then passed on."""
        want = Want(0, self.num_bytes, tensor_sink(self.tensor))
        read(self.store, [FileRead(self.part, [want])], num_threads=self.store.properties.parallel_reads)

    def read_bare(self) -> None:
        """The bare client's ranges, as many at once, copied to where they belong."""

        def fetch(start: int) -> None:
            stop = min(start + READ_BYTES, self.num_bytes)
            self.room[start:stop] = memoryview(
                obstore.get_range(self.client, self.address.key(NAME), start=start, end=stop)
            )

        with ThreadPoolExecutor(self.address.parallel) as pool:
            list(pool.map(fetch, range(0, self.num_bytes, READ_BYTES)))

    def check(self) -> None:
        """Raise if what was read last is not what was sent."""
        if self.room != self.arena:
            message = "what was read is not what was sent"
            raise RuntimeError(message)


def timed(act: Callable[[], None]) -> dict[str, float]:
    """Wall and processor seconds of one call, and the most memory beyond what was held before."""
    cpu = time.process_time()
    with highest_rss() as peak:
        began = time.perf_counter()
        act()
        seconds = time.perf_counter() - began
    values = {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}
    return {**values, "extra_bytes": float(peak[0])}


@contextmanager
def highest_rss() -> Iterator[list[int]]:
    """The growth of the highest resident size, which the kernel keeps: nothing is missed between samples."""
    Path("/proc/self/clear_refs").write_text("5")  # begins a new highest size
    before = _status("VmRSS")
    found = [0]
    yield found
    found[0] = max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


@contextmanager
def null_server(num_bytes: int) -> Iterator[str]:
    """A server that costs next to nothing; answers the URL of a home."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(HERE / "null_server.py"), str(port), str(num_bytes)])
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"s3://test/bench?endpoint_url=http://127.0.0.1:{port}&region=us-east-1"
    finally:
        process.kill()
        process.wait()


@contextmanager
def ministack_server(_num_bytes: int) -> Iterator[str]:
    """The S3 server of the tests; it is slower than the client."""
    with ministack() as server:
        yield server.home("bench")


SERVERS = {"null": null_server, "ministack": ministack_server}
OPERATIONS = ("put", "put_bare", "read", "read_bare")


def measure(server: str, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """All operations against one server, in turns; the first round is thrown away."""
    runs = []
    with SERVERS[server](num_bytes) as url:
        subject = Subject(url, num_bytes)
        for number in range(-1, rounds):
            order = OPERATIONS if number % 2 else ("put_bare", "put", "read_bare", "read")
            for name in order:
                if name.startswith("put"):
                    subject.free()
                else:
                    subject.room[: 1 << 20] = bytes(1 << 20)
                values = timed(getattr(subject, name))
                if name.startswith("read"):
                    subject.check()
                if number >= 0:
                    runs.append({"server": server, "round": number, "operation": name, **values})
                    print(
                        f"{server:10} {name:10} {num_bytes / values['seconds'] / 1e6:7.0f} MB/s", flush=True
                    )
    return runs


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the ratios of Holdfast's speed to the bare client's, by server: medians of those of each round.

    The same of processor time of the client's process: on a machine that others use too, it moves less.
    """
    found: dict[str, dict[str, float]] = {}
    for server in dict.fromkeys(run["server"] for run in runs):
        own = [run for run in runs if run["server"] == server]
        found[server] = {
            "put_ratio": _ratio(own, "put", "seconds"),
            "read_ratio": _ratio(own, "read", "seconds"),
            "put_cpu_ratio": _ratio(own, "put", "cpu_seconds"),
            "read_cpu_ratio": _ratio(own, "read", "cpu_seconds"),
            "put_extra_bytes": max(run["extra_bytes"] for run in own if run["operation"] == "put"),
            "put_bare_extra_bytes": max(run["extra_bytes"] for run in own if run["operation"] == "put_bare"),
        }
    return found


def _ratio(runs: list[dict[str, Any]], operation: str, key: str) -> float:
    ours = {run["round"]: run[key] for run in runs if run["operation"] == operation}
    bare = {run["round"]: run[key] for run in runs if run["operation"] == f"{operation}_bare"}
    return statistics.median(bare[number] / ours[number] for number in ours)


def main() -> int:
    """Measure, show a table, write the results; the exit status is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", default="2GiB", help="size of the object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=["null"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    num_bytes = parse_bytes(options.bytes, "--bytes")
    facts = machine.describe(HERE)
    runs = [run for server in options.servers for run in measure(server, num_bytes, options.rounds)]
    summary = summarize(runs)
    path = options.out or machine.results_path("remote", facts)
    results = {
        "machine": facts,
        "bytes": num_bytes,
        "rounds": options.rounds,
        "summary": summary,
        "runs": runs,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    _show(num_bytes, runs, summary)
    print(f"wrote {path}")
    return 0 if all(map(_reached, summary.values())) else 1


def _reached(values: dict[str, float]) -> bool:
    is_fast = values["put_ratio"] >= UPLOAD_GOAL and values["read_ratio"] >= BUCKET_READS
    return is_fast and values["put_extra_bytes"] <= MEMORY_GOAL_BYTES


def _show(num_bytes: int, runs: list[dict[str, Any]], summary: dict[str, dict[str, float]]) -> None:
    table = Table("server", *OPERATIONS, "put ratio", "read ratio", "memory over the arena")
    for server, values in summary.items():
        cells = []
        for name in OPERATIONS:
            speeds = [
                num_bytes / run["seconds"] / 1e6
                for run in runs
                if run["server"] == server and run["operation"] == name
            ]
            cells.append(f"{statistics.median(speeds):.0f} [{min(speeds):.0f}..{max(speeds):.0f}] MB/s")
        ratios = [
            f"{values[f'{what}_ratio']:.2f}, cpu {values[f'{what}_cpu_ratio']:.2f}"
            for what in ("put", "read")
        ]
        table.add_row(server, *cells, *ratios, format_bytes(values["put_extra_bytes"]))
    Console(width=200, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
