"""Cost of planning and committing for one of a thousand ranks, without tensor data."""

from __future__ import annotations

import argparse
import json
import resource
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
from holdfast.checkpoint.stage import SavePlan
from holdfast.checkpoint.state import CapturedState, Sharding, catalog_of
from holdfast.checkpoint.state.sharding import ShardLayout
from holdfast.checkpoint.store import open_store

HERE = Path(__file__).resolve().parent
NUM_TENSORS, RUN, ATTEMPT = 2000, "scale", 1
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
"""In turns: a transformer's. With 2000 of them the state is 200 GB."""
KINDS = ("fsdp", "hsdp", "fsdp-tp", "pipeline")
GOALS = {"plan_s": 0.1, "commit_s": COMMIT_S, "restore_plan_s": 1.0}


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
    hashes = "".join(digest(start.to_bytes(8, "little")) for start, _ in chunk_ranges(num_bytes, size))
    return part.finish(draft, part.DataFile(num_bytes, size, hashes))


def prepare(kind: str, world_size: int, home: Path) -> None:
    """Write the parts of all ranks of two steps; not timed."""
    catalogs: dict[str, tuple[Catalog, bytes]] = {}
    for rank in range(world_size):
        group = str(rank // (world_size // 16)) if kind == "pipeline" else ""
        if group not in catalogs:
            catalog, plan = plan_save(captured(kind, world_size, rank), rank)
            catalogs[group] = catalog, plan.catalog
        catalog, text = catalogs[group]
        shards = [
            part.Shard(name, tensor.dtype, tensor.shape, *region)
            for name, tensor, region in catalog.written_by(rank)
        ]
        layout = lay_out(shards, rank)
        for step in (1, 2):
            path = home / names.part(step, ATTEMPT, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(part_document(step, rank, world_size, layout.starts, text, layout.file_bytes))


def phase_plan(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Plan a save and write its part, as one rank."""
    state = captured(kind, world_size, rank)
    plan_s, (_, plan) = timed(lambda: plan_save(state, rank))
    part_s, document = timed(
        lambda: part_document(3, rank, world_size, plan.shared_starts, plan.catalog, plan.num_bytes)
    )
    return {"plan_s": plan_s, "part_s": part_s, "part_bytes": float(len(document))}


def phase_commit(kind: str, world_size: int, home: Path, rank: int) -> dict[str, float]:
    """Commit a first save, and one of the same structure after it, as rank 0's keeper."""
    store = open_store(str(home))
    writer = WriterId(RUN, ATTEMPT, 0, world_size)
    commit_s, _ = timed(lambda: commit(store, writer, 1))
    again_s, _ = timed(lambda: commit(store, writer, 2))
    return {
        "commit_s": commit_s,
        "commit_again_s": again_s,
        "manifest_bytes": float((home / names.manifest(1, ATTEMPT)).stat().st_size),
    }


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


PHASES: dict[str, Callable[[str, int, Path, int], dict[str, float]]] = {
    "plan": phase_plan,
    "commit": phase_commit,
    "restore": phase_restore,
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> int:
    """Measure all layouts and worlds; exit status 1 if a goal is missed at the largest world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024])
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = PHASES[options.phase](kind, world, options.dir, world // 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps(found | {f"{options.phase}_peak_bytes": grown * 1024.0}))
    return 0


def measure(kind: str, world: int, home: Path, rounds: int) -> dict[str, Any]:
    """Median and range of every number of one layout on one world."""
    shutil.rmtree(home, ignore_errors=True)
    found: dict[str, list[float]] = {}
    try:
        prepare(kind, world, home)
        for _ in range(rounds):
            for step in (1, 2):
                (home / names.manifest(step, ATTEMPT)).unlink(missing_ok=True)
            for phase in PHASES:
                for key, value in _ask(phase, kind, world, home).items():
                    found.setdefault(key, []).append(value)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    spread = {key: [statistics.median(seen), min(seen), max(seen)] for key, seen in found.items()}
    return {"kind": kind, "world_size": world, "values": spread}


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
    table = Table("layout", "ranks", "plan", "part", "commit", "again", "restore plan", "parts read", "peak")
    for row in rows:
        values = {key: spread[0] for key, spread in row["values"].items()}
        seconds = ("plan_s", "part_s", "commit_s", "commit_again_s", "restore_plan_s")
        peak = max(values[f"{phase}_peak_bytes"] for phase in PHASES)
        table.add_row(
            row["kind"],
            str(row["world_size"]),
            *(f"{values[key]:.3f} s" for key in seconds),
            f"{values['parts_read']:.0f}",
            f"{peak / 1e6:.0f} MB",
        )
    console = Console(width=120)
    console.print(table)
    largest = max(row["world_size"] for row in rows)
    missed = [
        f"{row['kind']}: {key} {row['values'][key][0]:.3f} s, goal {goal} s"
        for row in rows
        for key, goal in GOALS.items()
        if row["world_size"] == largest and row["values"][key][0] > goal
    ]
    console.print(f"wrote {path}", *(f"MISSED {line}" for line in missed), sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
