"""Runs the corpus again, each case within limits: `python -m campaigns.fuzz.replay [TARGET...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from campaigns.fuzz.bounded import WARM_UP_S, run_case
from campaigns.fuzz.targets import every
from campaigns.fuzz.worker import CORPUS, read_case


def main(names: list[str]) -> int:
    """Run every case of some targets, by default of all; return 1 if any fails."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    targets = {name: target for name, target in every().items() if not names or name in names}
    for target in targets.values():  # imports and caches, before memory is limited
        for seed in target.seeds():
            run_case(
                lambda target=target, seed=seed: target.run(seed), memory_bytes=None, processor_s=WARM_UP_S
            )
    num_cases = num_failures = 0
    for name, target in targets.items():
        for path in sorted((CORPUS / name).glob("*")):
            num_cases += 1
            failure = run_case(lambda target=target, path=path: target.run(read_case(path)))
            if failure is not None:
                num_failures += 1
                print(f"{name}/{path.name}: {failure.kind} at {failure.place}\n{failure.text}")
    print(f"{num_cases} cases, {num_failures} failures")
    return int(num_failures > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
