"""Cost of planning and committing for one of thousands of ranks, without tensor data."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machine
import torch
from goals import COMMIT_S
from rich.console import Console
from rich.table import Table

from holdfast.checkpoint.format import names, part
from holdfast.checkpoint.format import values as value_format
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.checkpoint.format.layout import FillTarget, lay_out
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import commit
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.restore.fill import plan_fill
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.run.mirroring import RankPlace, place_copies, writers_of
from holdfast.checkpoint.stage import SavePlan
from holdfast.checkpoint.state import CapturedState, Sharding, catalog_of
from holdfast.checkpoint.state.sharding import ShardLayout
from holdfast.checkpoint.store import open_store

HERE = Path(__file__).resolve().parent
NUM_TENSORS, RUN, ATTEMPT = 2000, "scale", 1
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
"""In turns: a transformer's. With 2000 of them the state is 107 GB, and 16 times that in 16 stages."""
RANKS_ON_HOST, HOSTS_IN_ZONE, NUM_COPIES = 8, 16, 2
KINDS = ("fsdp", "hsdp", "fsdp-tp", "pipeline")
GOALS = {"plan_s": 0.1, "restore_plan_s": 1.0, "place_s": 0.1}


def layout_of(kind: str, world_size: int, rank: int) -> ShardLayout:
    """Return the layout of tensors on the ranks of `rank`'s mesh."""
    ranks = tuple(range(world_size))
    if kind == "fsdp":
        return ShardLayout(((0, world_size),), (ranks,))
    if kind == "hsdp":  # 8 replica groups
        size = world_size // 8
        return ShardLayout(((0, size),), tuple(ranks[i : i + size] for i in range(0, world_size, size)))
    if kind == "fsdp-tp":  # 8 tensor-parallel ranks side by side: strided shards
        order = tuple(rank for first in range(8) for rank in ranks[first::8])
        return ShardLayout(((0, 8), (0, world_size // 8)), (order,))
    size = world_size // 16  # 16 stages, each sharded
    first = rank // size * size
    return ShardLayout(((0, size),), (ranks[first : first + size],))


def captured(kind: str, world_size: int, rank: int) -> CapturedState:
    """Return the captured state of a rank: its parts of all tensors, on the meta device."""
    layout = layout_of(kind, world_size, rank)
    stage = f"stage{rank // (world_size // 16)}." if kind == "pipeline" else ""
    shardings = {
        f"model.{stage}layers.{i // 9}.weight{i}": Sharding(SHAPES[i % len(SHAPES)], layout)
        for i in range(NUM_TENSORS)
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, sharding in shardings.items():
        (region,) = sharding.regions_of(rank)
        tensors[name] = torch.empty(region.sizes, dtype=torch.bfloat16, device="meta")
    none: frozenset[str] = frozenset()
    structure: Any = SimpleNamespace(
        shardings=shardings,
        owned=frozenset(shardings),
        frozen=none,
        tied={},
        per_rank=none,
        temporary=none,
        places={},
    )
    return CapturedState(tensors, {}, structure)


def plan_save(state: CapturedState, rank: int) -> tuple[Catalog, SavePlan]:
    """Make the plan that a rank makes once for a structure, before its first save."""
    catalog = catalog_of(state)
    return catalog, SavePlan(state, catalog, rank)


def part_document(
    step: int, rank: int, world_size: int, starts: Any, catalog: bytes, num_bytes: int
) -> bytes:
    """A part as a keeper finishes it; chunk hashes are of no bytes, but as many as the file would have."""
    values = {"epoch": value_format.encode(3, "epoch"), "rng": value_format.encode({"seed": rank}, "rng")}
    facts = part.PartFacts(RUN, step, ATTEMPT, rank, world_size, ancestors=(), values=values, own=())
    draft = part.draft(facts, starts, catalog)
    size = chunk_bytes_for(num_bytes)
    return part.finish(draft, part.DataFile(num_bytes, size, _hashes(num_bytes, size)))


@functools.lru_cache(maxsize=64)
def _hashes(num_bytes: int, chunk_bytes: int) -> str:
    return "".join(digest(start.to_bytes(8, "little")) for start, _ in chunk_ranges(num_bytes, chunk_bytes))


def prepare(kind: str, world_size: int, home: Path) -> None:
    """Write the parts of all ranks, durably; not timed."""
    catalogs: dict[int, tuple[Catalog, Catalog, bytes]] = {}
    starts: dict[Any, tuple[tuple[int, ...], int]] = {}
    (home / names.step_dir(1)).mkdir(parents=True)
    for rank in range(world_size):
        stage = rank // (world_size // 16) if kind == "pipeline" else 0
        if stage not in catalogs:
            catalog, plan = plan_save(captured(kind, world_size, rank), rank)
            catalogs[stage] = catalog, _one_of_each(catalog), plan.catalog
        catalog, few, text = catalogs[stage]
        key = stage, tuple((name, region.sizes) for name, _, region in few.written_by(rank))
        if key not in starts:  # most ranks have shards of the same sizes
            layout = lay_out(list(catalog.shards_of(rank)), rank)
            starts[key] = layout.starts, layout.file_bytes
        document = part_document(1, rank, world_size, starts[key][0], text, starts[key][1])
        (home / names.part(1, ATTEMPT, rank)).write_bytes(document)
    os.sync()


def _one_of_each(catalog: Catalog) -> Catalog:
    """Return the catalog with only one of the tensors that are partitioned alike and have the same shape."""
    found = {(id(tensor.partitioning), tensor.shape): name for name, tensor in catalog.tensors.items()}
    return Catalog({name: catalog.tensors[name] for name in found.values()}, {})


def phase_plan(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Plan a save and write its part, as one rank."""
    state = captured(kind, world_size, rank)
    plan_s, (_, plan) = timed(lambda: plan_save(state, rank))
    part_s, document = timed(
        lambda: part_document(3, rank, world_size, plan.shared_starts, plan.catalog, plan.num_bytes)
    )
    return {"plan_s": plan_s, "part_s": part_s, "part_bytes": float(len(document))}


def phase_commit(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Commit a first save, and the same again, as one of the same structure after it, as rank 0's keeper."""
    store, manifest = open_store(str(home)), home / names.manifest(1, ATTEMPT)
    writer = WriterId(RUN, ATTEMPT, 0, world_size)
    found: dict[str, float] = {}
    for key in ("commit", "commit_again"):
        manifest.unlink(missing_ok=True)
        began_s = time.process_time()
        found[f"{key}_s"], _ = timed(lambda: commit(store, writer, 1))
        found[f"{key}_cpu_s"] = time.process_time() - began_s
    sizes = [one.stat().st_size for one in manifest.parent.iterdir() if one != manifest]
    return found | {"manifest_bytes": float(manifest.stat().st_size), "parts_bytes": float(sum(sizes))}


def phase_restore(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Plan what one rank of three quarters as many reads, fully sharded; opens the parts it needs."""
    store, smaller = open_store(str(home)), world_size * 3 // 4
    mine = min(rank, smaller - 1)
    wanted = layout_of("pipeline" if kind == "pipeline" else "fsdp", smaller, mine)
    stage = f"model.stage{mine // (smaller // 16)}." if kind == "pipeline" else "model."

    def plan() -> tuple[int, int]:
        manifest = read_manifest(store, CheckpointId(attempt=ATTEMPT, step=1), RUN)
        targets = {}
        for name, tensor in manifest.tensors.items():
            regions = Sharding(tensor.shape, wanted).regions_of(mine) if name.startswith(stage) else ()
            for region in (one for one in regions if one.num_items):
                targets[name] = [FillTarget(torch.empty(region.sizes, dtype=torch.bfloat16), region)]
        jobs = plan_fill(Parts(store, manifest), targets, mine)
        return len(jobs), sum(len(job.wanted) for job in jobs)

    restore_plan_s, (num_parts, num_reads) = timed(plan)
    return {
        "restore_plan_s": restore_plan_s,
        "parts_read": float(num_parts),
        "shards_wanted": float(num_reads),
    }


def phase_place(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Choose the holders of all copies in memory of other hosts, as each rank does once at a start."""
    hosts = [rank // RANKS_ON_HOST for rank in range(world_size)]
    places = [RankPlace(f"host-{host:05d}", f"rack-{host // HOSTS_IN_ZONE:04d}") for host in hosts]
    place_s, held = timed(lambda: writers_of(place_copies(places, NUM_COPIES), rank))
    return {"place_s": place_s, "copies_held": float(len(held))}


PHASES: dict[str, Callable[[str, int, Path, int], dict[str, float]]] = {
    "plan": phase_plan,
    "commit": phase_commit,
    "restore": phase_restore,
    "place": phase_place,
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> int:
    """Measure all layouts and worlds; exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/scale_<hardware>_<date>.json")
    parser.add_argument("--phase", choices=list(PHASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        return _run_phase(options)
    rows = [
        measure(kind, world, options.dir / f"scale-{kind}-{world}", options.rounds)
        for kind in options.kinds
        for world in options.worlds
    ]
    return report(rows, options)


def _run_phase(options: argparse.Namespace) -> int:
    """One phase in a process of its own, so that its peak of memory is its own."""
    kind, world = options.kinds[0], options.worlds[0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = _peak_bytes()
    found = PHASES[options.phase](kind, world, options.dir, world // 2)
    print(json.dumps(found | {f"{options.phase}_grown_bytes": _peak_bytes() - before}))
    return 0


def _peak_bytes() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024.0 * int(found[1])


def measure(kind: str, world: int, home: Path, rounds: int) -> dict[str, Any]:
    """Median and range of every number of one layout on one world."""
    shutil.rmtree(home, ignore_errors=True)
    found: dict[str, list[float]] = {}
    try:
        prepare(kind, world, home)
        for _ in range(rounds):
            for phase in PHASES:
                for key, value in _ask(phase, kind, world, home).items():
                    found.setdefault(key, []).append(value)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    spread = {key: [statistics.median(seen), min(seen), max(seen)] for key, seen in found.items()}
    return {"kind": kind, "world_size": world, "load": os.getloadavg()[0], "values": spread}


def _ask(phase: str, kind: str, world: int, home: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--phase", phase, "--kinds", kind, "--worlds", str(world)]
    answer = subprocess.run([*command, "--dir", str(home)], check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Write the results and show them as a table."""
    options.dir.mkdir(exist_ok=True)
    facts = machine.describe(options.dir)
    path = options.out or machine.results_path("scale", facts)
    document = {"machine": facts, "rounds": options.rounds, "tensors": NUM_TENSORS, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
    headings = ("plan", "part", "commit", "again", "processor", "restore plan", "placement")
    table = Table("layout", "ranks", *headings, "parts read", "peak, rank 0", "others")
    for row in rows:
        values = {key: spread[0] for key, spread in row["values"].items()}
        seconds = ("plan", "part", "commit", "commit_again", "commit_cpu", "restore_plan", "place")
        peak = max(values[f"{phase}_grown_bytes"] for phase in PHASES if phase != "commit")
        table.add_row(
            row["kind"],
            str(row["world_size"]),
            *(f"{values[f'{key}_s']:.3f} s" for key in seconds),
            f"{values['parts_read']:.0f}",
            f"{values['commit_grown_bytes'] / 1e6:.0f} MB",
            f"{peak / 1e6:.0f} MB",
        )
    console = Console(width=140)
    console.print(table)
    missed = [
        f"{row['kind']}, {row['world_size']} ranks: {key} {row['values'][key][0]:.3f} s, goal {goal} s"
        for row in rows
        for key, goal in (*GOALS.items(), ("commit_s", COMMIT_S.get(row["world_size"], sys.maxsize)))
        if row["values"][key][0] > goal
    ]
    console.print(f"wrote {path}", *(f"MISSED {line}" for line in missed), sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
