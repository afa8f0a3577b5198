"""The goals that Holdfast has set itself, judged against the measured numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from results import Results, Spread

KEEPER_BYTES = 60e6
SMALL_EXTRA_S = 0.030

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal: the median must be under (or, with `at_least`, not under) the bound."""

    goal: str
    bound: float
    found: Spread | None
    unit: str
    at_least: bool = False

    @property
    def noisy(self) -> bool:
        """True if the rounds disagree so much that they cannot tell: nothing here can truly be negative."""
        found = self.found
        return found is not None and (found.median < 0 or (found.least < 0 and found.most > self.bound))

    @property
    def passed(self) -> bool | None:
        """None if it was not measured, or drowned in noise."""
        if self.found is None or self.noisy:
            return None
        value = self.found.median
        return value >= self.bound if self.at_least else value <= self.bound


def judge(results: Results) -> list[Verdict]:
    """Every goal that applies to a measured state."""
    verdicts = []
    for state in results.states():
        paired = _Paired(results, state)
        found = [_small(paired)] if state == "small-8000" else _large(results, state, paired)
        verdicts += [replace(verdict, goal=f"{state}: {verdict.goal}") for verdict in found]
    return verdicts


def _large(results: Results, state: str, paired: _Paired) -> list[Verdict]:
    blocked = results.spread(state, "holdfast", "blocked_s")
    in_ms = Spread(blocked.median * 1e3, blocked.least * 1e3, blocked.most * 1e3) if blocked else None
    found = [
        Verdict("save() blocks", 10.0, in_ms, "ms"),
        Verdict(
            "save() blocks, share of torch.save's",
            0.01,
            paired("torch-save", lambda own, peer: own["blocked_s"] / peer["blocked_s"]),
            "x",
        ),
        Verdict(
            "training lost per save, in memcpys",
            1.5,
            results.training_lost(state, "holdfast"),
            "x",
        ),
        Verdict(
            "staged to durable, share of raw write speed",
            0.85,
            paired("holdfast", lambda own, _: own["near_write_s"] / (own["durable_s"] - own["staged_s"])),
            "x",
            at_least=True,
        ),
        Verdict(
            "verified restore, cache dropped, share of raw read speed",
            0.85,
            paired("holdfast", lambda own, _: own["near_read_s"] / own["load_cold_s"]),
            "x",
            at_least=True,
        ),
        Verdict(
            "extra memory, in (1.05 states + 60 MB)",
            1.0,
            paired(
                "holdfast", lambda own, _: own["extra_bytes"] / (1.05 * own["state_bytes"] + KEEPER_BYTES)
            ),
            "x",
        ),
    ]
    trained = results.spread(state, "holdfast", "lost_s") is not None
    return [verdict for verdict in found if trained or "training" not in verdict.goal]


def _small(paired: _Paired) -> Verdict:
    found = paired("holdfast", lambda own, _: own["durable_s"] / (2 * own["near_write_s"] + SMALL_EXTRA_S))
    return Verdict("save to durable, in (2 raw writes + 30 ms)", 1.0, found, "x")


class _Paired:
    """Ratios of Holdfast's numbers to another contestant's, or its own limits, of the same round."""

    def __init__(self, results: Results, state: str) -> None:
        self._results = results
        self._state = state

    def __call__(self, other: str, ratio: Callable[[Values, Values], float]) -> Spread | None:
        return self._results.paired(self._state, "holdfast", other, ratio)
