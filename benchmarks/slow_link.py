"""Saves into a bucket behind a slow link, as they are and with `Home(compress=True)`, and restores from it.

A small GPT trains on the text of docs/, in fp32, or in bf16 at a low learning rate, and saves every 10 steps.
The link is the loopback device of a network namespace, whose rate `tc` bounds: this needs root, or a kernel
that allows user namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import psutil
import torch
from delta import RATES, train
from rich.console import Console
from rich.table import Table

from holdfast import Checkpointer, Home, Local

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers import ministack

HERE = Path(__file__).resolve().parent
EVERY, SAVES, WIDTH = 10, 6, 512
TRAININGS = {"fp32": ("fp32", RATES[0]), "bf16, low learning rate": ("bf16", RATES[1])}
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Start a process in a namespace for each rate, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0], help="of the link, in MB/s")
    parser.add_argument("--out", type=Path, help="default results/slowlink_<hardware>_<date>.json")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # the results of one rate
    options = parser.parse_args()
    if options.inside is not None:
        ways = itertools.product(TRAININGS, (False, True))
        options.inside.write_text(json.dumps([_measure(name, compress=compress) for name, compress in ways]))
        return 0
    facts = machine.describe(HERE)
    rows = [row | {"link_mb_s": rate} for rate in options.rates for row in _behind_link(rate)]
    path = options.out or machine.results_path("slowlink", facts)
    path.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    table = Table(
        "training", "link", "compressed", "plain", "sent", "in home after", "of a core", "restored in"
    )
    for row in rows:
        table.add_row(
            row["training"], f"{row['link_mb_s']:.0f} MB/s", "yes" if row["compress"] else "no",
            *(f"{row[key]:.0f} MB" for key in ("plain_mb", "sent_mb")),
            *(f"{row[key]:.1f} s" for key in ("in_home_s", "core_s", "restore_s")),
        )  # fmt: skip
    console.print(table)
    console.print(f"wrote {path}")
    return 0


def _behind_link(rate: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        link = f"tc qdisc add dev lo root tbf rate {round(rate * 8000)}kbit burst 64kb latency 400ms"
        script = f'ip link set lo mtu 1500 up && {link} && exec "$@"'
        words = ["unshare", "--net", "--map-root-user", "sh", "-c", script, "sh"]
        subprocess.run([*words, sys.executable, __file__, "--inside", str(out)], check=True)
        return json.loads(out.read_text())


def _measure(name: str, *, compress: bool) -> dict[str, Any]:
    """Return means over the saves after the third: the first measures the link, the second is a base."""
    with tempfile.TemporaryDirectory() as folder, ministack() as server:
        os.environ.update(server.env)
        home = Home(server.home("run", timeout="600"), compress=compress)
        steps = train(*TRAININGS[name], 0, WIDTH)
        _, model, optimizer = next(steps)
        state, found = {"model": model, "optimizer": optimizer}, []
        with Checkpointer(home, state, local=Local(Path(folder) / "local"), quiet=True) as checkpointer:
            for step, *_ in itertools.islice(steps, EVERY * SAVES - 1):
                if step % EVERY == 0:
                    before, began = _used(), time.perf_counter()
                    checkpointer.save(step)
                    checkpointer.wait()
                    found.append([time.perf_counter() - began, *map(operator.sub, _used(), before)])
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.zero_()
        began = time.perf_counter()
        with Checkpointer(home, state, local=Local(Path(folder) / "other"), quiet=True) as checkpointer:
            checkpointer.restore()
        restore_s = time.perf_counter() - began
        if not all(map(torch.equal, weights, model.parameters())):
            raise RuntimeError("the restored weights are others")
        (*_, file) = sorted(Path(folder).rglob("*.safetensors"))
        plain_mb = file.stat().st_size / 1e6
    in_home_s, core_s, sent = (sum(column) / len(column) for column in zip(*found[3:], strict=True))
    row = {
        "training": name,
        "compress": compress,
        "plain_mb": plain_mb,
        "sent_mb": sent / 1e6,
        "in_home_s": in_home_s,
    }
    return row | {"core_s": core_s, "restore_s": restore_s, "saves": found}


def _used() -> tuple[float, int]:
    """Return the seconds of a core that the keeper has used, and the bytes that the link has carried."""
    times = [
        child.cpu_times()
        for child in psutil.Process().children(recursive=True)
        if any("holdfast.checkpoint.keeper" in word for word in child.cmdline())
    ]
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return sum(one.user + one.system for one in times), sent


if __name__ == "__main__":
    sys.exit(main())
