"""A worker: mutates cases of one target and runs them within limits, in a process of its own."""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
import random
import sys
import time
from pathlib import Path

from campaigns.fuzz.bounded import WARM_UP_S, run_case
from campaigns.fuzz.targets import Target, every

CORPUS = Path(__file__).resolve().parent / "corpus"
MAX_CASE_BYTES = 1 << 20
FOUND = Path(__file__).resolve().parents[2] / "build" / "fuzz"


def read_case(path: Path) -> bytes:
    """Return a case of the corpus; large ones are compressed."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def cases_of(target: Target) -> list[bytes]:
    """Return the seeds of a target and what was found for it before."""
    return target.seeds() + [read_case(path) for path in sorted((CORPUS / target.name).glob("*"))]


def fuzz(
    name: str, seconds: float, seed: int, out: multiprocessing.Queue[tuple[int, dict[str, str]]]
) -> None:
    """Run mutated cases of a target; put their number and the failures into `out`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    target = every()[name]
    chance = random.Random(seed)
    pool = cases_of(target)
    for case in pool:  # imports, caches
        run_case(lambda case=case: target.run(case), memory_bytes=None, processor_s=WARM_UP_S)
    current = FOUND / f"{name}.current"
    current.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    end_s, num_cases = time.monotonic() + seconds, 0
    while time.monotonic() < end_s or num_cases < 50:
        case = chance.choice(pool)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            case = target.mutate(case, chance)
            if len(case) > MAX_CASE_BYTES:
                break
        if len(case) > MAX_CASE_BYTES:
            continue
        current.write_bytes(case)
        num_cases += 1
        failure = run_case(lambda case=case: target.run(case))
        if failure is None:
            continue
        key = f"{failure.kind} {failure.place}"
        if key not in failures:
            failures[key] = failure.text
            place = FOUND / name / hashlib.sha256(case).hexdigest()[:12]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(case)
            place.with_suffix(".txt").write_text(f"{key}\n{failure.text}")
    current.unlink()
    out.put((num_cases, failures))
