"""A program that saves checkpoints as many do: `python checkpoint_writer.py DIRECTORY FIRST LAST`.

Each step writes two data files, one of them too large to be copied, four small shards, a marker with the
hashes of all, overwrites `latest` in place, and deletes the step before the last three, its marker first.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path

KEEP = 3
NUM_SHARDS = 4
COPIED_BYTES = 100_000


def save(folder: Path, step: int) -> None:
    """Save a step."""
    draw = random.Random(step)
    hashes = {}
    files = {f"data-{step}-a": 3 * COPIED_BYTES, f"data-{step}-b": 1000}
    files |= {f"shard-{step}-{number}": 1000 + number for number in range(NUM_SHARDS)}
    for name, num_bytes in files.items():
        data = draw.randbytes(num_bytes)
        hashes[name] = hashlib.sha256(data).hexdigest()
        with (folder / name).open("wb", buffering=0) as file:
            for at in range(0, num_bytes, 50_000):
                file.write(data[at : at + 50_000])
    (folder / f"marker-{step}.tmp").write_text(json.dumps(hashes))
    (folder / f"marker-{step}.tmp").rename(folder / f"marker-{step}")
    with (folder / "latest").open("w") as file:
        file.write(str(step))
    (folder / f"marker-{step - KEEP}").unlink(missing_ok=True)
    for name in files:
        (folder / name.replace(str(step), str(step - KEEP), 1)).unlink(missing_ok=True)


def main() -> None:
    """Save steps, and print each to standard output."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for step in range(first, last + 1):
        save(folder, step)
        os.write(1, b"%d\n" % step)


if __name__ == "__main__":
    main()
