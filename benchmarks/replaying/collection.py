"""Traces that the benchmark replays: those in `benchmarks/traces`, and SkyPilot's if they are there."""

from __future__ import annotations

from pathlib import Path

from .schedule import Trace
from .traces import parse_bamboo, parse_infinitehbd, parse_parcae, parse_skypilot, sample_llama

FOLDER = Path(__file__).resolve().parents[1] / "traces"
SKYPILOT = {
    "SkyPilot 1 node": "preemption/1-node/aws-04-22-2023/us-west-2c_v100_1.json",
    "SkyPilot 4 nodes": "preemption/4-node/aws-08-03-2023/us-west-2c_v100_1.json",
}
LLAMA_COUNT = 419
LLAMA_SEED = 3


def read_all(skypilot: Path | None) -> list[Trace]:
    """Return all traces.

    Args:
        skypilot: folder with a checkout of skypilot-org/spot-traces.
    """
    bamboo = (FOLDER / "bamboo_g4dn_us-east-1c_2020-11-20.csv").read_text()
    found = [
        sample_llama(LLAMA_SEED, LLAMA_COUNT),
        parse_infinitehbd((FOLDER / "infinitehbd_first_faults.json").read_text(), "InfiniteHBD"),
        parse_bamboo(bamboo, "Bamboo g4dn", unit_s=1.0),
        parse_parcae((FOLDER / "parcae_bert_hh_55_65.txt").read_text(), "Parcae hh"),
    ]
    if skypilot is not None:
        found += [parse_skypilot((skypilot / path).read_text(), name) for name, path in SKYPILOT.items()]
    return found
