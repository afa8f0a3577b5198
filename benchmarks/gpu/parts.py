"""Parts of the GPU run: their commands, and the time that each may take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
BUDGET_S = 460.0
"""Time of all parts together: 8 minutes, less the start of the run."""
ANSWER, FOLDER, SECONDS = "<answer>", "<folder>", "<seconds>"
"""Words of a command: the file for its results, a folder for its checkpoints, and its time limit."""
END_S = 10.0
"""Time that is left of a limit when a part that watches its limit should end."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a command, and its share of the budget in seconds."""

    name: str
    command: tuple[str, ...]
    share_s: float

    def words(self, answer: Path, folder: Path, limit_s: float) -> list[str]:
        """Return the command with its files and its time."""
        own: Mapping[str, str] = {
            ANSWER: str(answer),
            FOLDER: str(folder),
            SECONDS: f"{max(0.0, limit_s - END_S):.0f}",
        }
        return [own.get(word, word) for word in self.command]


def limit_of(later: Sequence[Part], left_s: float) -> float:
    """Return the time that a part may take: all that is left, but for the shares of the later ones."""
    return max(0.0, left_s - sum(one.share_s for one in later))


def list_parts(device: str) -> list[Part]:
    """Return the parts in their order. The shares of all are within the budget."""
    python, is_dry = sys.executable, device == "cpu"
    at, place = ("--device", device), ("--dir", FOLDER)

    def script(name: str, *words: str) -> tuple[str, ...]:
        return (python, str(BENCHMARKS / name), *at, *words, "--out", ANSWER)

    small = "tiny" if is_dry else "gpt2-124m"
    sizes = ("tiny",) if is_dry else ("gpt2-124m", "gpt2-355m")
    largest = () if is_dry else ("gpt2-xl",)
    stalls = ("--seconds", SECONDS, *place, "--states", *sizes)
    tests = (python, "-m", "pytest", "-q", "-m", "gpu", *(("--collect-only",) if is_dry else ()))
    example = str(ROOT / "examples" / "gpt" / "train.py")
    questions = ("--only", "syncs,compile,shapes,input")  # `fit` searches for batches
    tune = (python, "-m", "holdfast.cli", "tune", "--json", *questions, "--steps", "4" if is_dry else "10")
    return [
        Part("tests", (*tests, *_gpu_tests()), 50.0),
        Part("stalls", script("gpu/stalls.py", *stalls, *largest), 165.0),
        Part("overlap", script("gpu/overlap.py", *place, "--state", small), 25.0),
        Part("restore", script("tiers.py", *place, "--state", small, "--rounds", "1"), 40.0),
        Part("fit", script("gpu/fitting.py"), 20.0),
        Part("shard", script("sharding.py", "--ranks", "1", "--rounds", "1" if is_dry else "3"), 30.0),
        Part("compile", script("compiled.py", *place, "--rounds", "1"), 50.0),
        Part("tune", (*tune, example, "--eager"), 60.0),  # it compares with compiled steps itself
        Part("peers", script("gpu/stalls.py", "--peers", *stalls), 20.0),
    ]


def _gpu_tests() -> list[str]:
    """Return the files with tests that need a GPU: others may import what this machine lacks."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path) for path in files if "pytest.mark.gpu" in path.read_text())
