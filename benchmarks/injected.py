"""Detection of injected faults: the campaigns of lm-resiliency's fault kit against the audit of replicas.

The kit decides by itself whether a fault was injected, detected and located. It is not a dependency:
`pip install --no-deps lm-resiliency==0.2.0`, with Python before 3.13.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import Preemption
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store

HERE = Path(__file__).resolve().parent
MAGNITUDES = ("catastrophic", "large", "medium", "subtle", "near_invisible")
STEPS, EVERY, FAULT_AT = 10, 2, 4
"""Steps of a run, steps from save to save, and the iteration of the fault."""
WAIT_S = 1200
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True, slots=True)
class Case:
    """One run; without a surface it is a clean one."""

    world_size: int
    surface: str = ""
    operation: str = ""
    magnitude: str = ""
    is_permanent: bool = True

    def campaign(self) -> dict[str, Any]:
        """Return the campaign as the kit's JSON."""
        parameters: dict[str, Any] = {"operation": self.operation, "scope": "single"}
        if self.magnitude:
            parameters["magnitude"] = self.magnitude
        if self.operation == "set_value":
            parameters["value"] = 1.0
        if self.surface == "optimizer_state":
            parameters["state_key"] = "exp_avg"
        target = {"surface": self.surface, "rank": self.world_size - 1, "module_path": "0"}
        return {
            "schema_version": 1,
            "name": "replicas",
            "incidents": [
                {
                    "incident_id": "one",
                    "trigger": {"at": [FAULT_AT]},
                    "lifetime": {"until": "campaign_end"} if self.is_permanent else {"iterations": 2},
                    "faults": [
                        {
                            "fault_id": "fault",
                            "type": "tensor_corruption",
                            "target": target,
                            "parameters": parameters,
                        }
                    ],
                }
            ],
        }


def main() -> int:
    """Run all cases, and return 1 if a healthy run was accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=20, help="runs without a fault")
    parser.add_argument("--out", type=Path, help="default results/injected_<hardware>_<date>.json")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for world_size in (3, 2):
        cases = [case for case in _cases(options.clean) if case.world_size == world_size]
        found += _run_all(random.Random(world_size).sample(cases, len(cases)))
    return _report(options, found)


def _cases(num_clean: int) -> Iterator[Case]:
    for surface in ("weight", "optimizer_state", "bias", "gradient"):
        for magnitude in MAGNITUDES:
            yield Case(3, surface, "single_bitflip", magnitude)
        for operation in ("multi_bitflip", "scale", "noise"):
            for magnitude in (MAGNITUDES[0], MAGNITUDES[-1]):
                yield Case(3, surface, operation, magnitude)
        for operation in ("sign_flip", "set_value"):
            yield Case(3, surface, operation)
        if surface != "gradient":
            for magnitude in (MAGNITUDES[0], MAGNITUDES[-1]):
                yield Case(3, surface, "single_bitflip", magnitude, is_permanent=False)
        for magnitude in (MAGNITUDES[0], MAGNITUDES[-1]):
            yield Case(2, surface, "single_bitflip", magnitude)
    for number in range(num_clean):
        yield Case(2 + number % 2)


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    """Run cases of one world size, one after the other in the same ranks."""
    context = multiprocessing.get_context("fork")  # importing torch takes longer than a run
    answers = context.Queue()
    world_size = cases[0].world_size
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, cases, answers))
            for rank in range(world_size)
        ]
        for one in ranks:
            one.start()
        found = []
        for number in range(len(cases)):
            found.append(answers.get(timeout=WAIT_S))
            console.print(f"{number + 1} of {len(cases)}: {found[-1]}")
        for one in ranks:
            one.join(WAIT_S)
    return found


def _rank(rank: int, world_size: int, folder: str, cases: list[Case], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    for number, case in enumerate(cases):
        home = Path(folder) / str(number)
        outcome = _run(case, rank, home)
        if rank == world_size - 1:
            answers.put({**asdict(case), **outcome})
        dist.barrier()
        if rank == 0:
            shutil.rmtree(home, ignore_errors=True)  # keepers may still write their history
    dist.destroy_process_group()


def _run(case: Case, rank: int, home: Path) -> dict[str, Any]:
    """Train, and return the kit's judgement of what the audit has found, on the rank with the fault."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)

    def train() -> None:
        optimizer.zero_grad()
        net(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()

    train()  # the moments exist
    session = _inject(case, net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt = holdfast.Checkpointer(
            home,
            {"net": net, "optimizer": optimizer},
            every=EVERY,
            keep=None,
            quiet=True,
            memory="64MiB",
            watches=[Preemption("none", signals=False), holdfast.CompileCache("off")],
        )
        for _ in ckpt.steps(STEPS):
            train()
            ckpt.wait()  # steps of milliseconds would have several saves under way at once
    dist.barrier()  # the keeper of rank 0 has written all of its history
    lines, _ = read_lines(open_store(str(home)))
    first = next((line for line in lines if line["event"] == "replicas-differ"), None)
    outcome = {
        "step": None if first is None else first["step"],
        "ranks": first and first["difference"]["ranks"],
    }
    return outcome | ({} if session is None else _judge(session, first))


def _inject(case: Case, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if not case.surface:
        return None
    from lm_resiliency.fault_injection import (  # pyright: ignore[reportMissingImports] - the judge's own package
        FaultCampaign,
        enable_fault_injection,
    )

    campaign = FaultCampaign.from_dict(case.campaign())
    return enable_fault_injection(net, optimizer, campaign=campaign, completed_iterations=0)


def _judge(session: Any, first: dict[str, Any] | None) -> dict[str, Any]:
    from lm_resiliency.fault_injection import LocalizationResult  # pyright: ignore[reportMissingImports] - as above

    records = session.records
    results = []
    if first is not None and records:
        ranks = tuple(first["difference"]["ranks"])
        results = [
            LocalizationResult(records[0].occurrence_id, detected=True, failed_ranks=ranks, kind="sdc")
        ]
    evaluations = session.evaluate(results).evaluations
    session.close()
    if not evaluations:
        return {"injected": False}
    one = evaluations[0]
    return {"injected": one.injection_succeeded, "detected": one.detected, "localized": one.localized}


def _report(options: argparse.Namespace, found: list[dict[str, Any]]) -> int:
    rows: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for one in found:
        lifetime = "permanent" if one["is_permanent"] else "2 iterations"
        key = (one["world_size"], one["surface"] or "none", lifetime if one["surface"] else "")
        count = rows.setdefault(key, collections.Counter())
        count["runs"] += 1
        count["injected"] += bool(one.get("injected"))
        count["detected"] += bool(one["ranks"])
        count["localized"] += bool(one.get("localized"))
        count["next"] += one["step"] == FAULT_AT
    table = Table(
        "ranks", "surface", "lifetime", "runs", "injected", "detected", "at the next save", "located"
    )
    for key, count in rows.items():
        numbers = (count[name] for name in ("runs", "injected", "detected", "next", "localized"))
        table.add_row(*map(str, (*key, *numbers)))
    console.print(table)
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("injected", facts)
    path.write_text(json.dumps({"machine": facts, "runs": found}, indent=1) + "\n")
    console.print(f"wrote {path}")
    return int(any(one["ranks"] and not one["surface"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
