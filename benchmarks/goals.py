"""Goals of Holdfast, judged against the newest measurements of one machine. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results import Results, Spread, combine

KEEPER_BYTES = 60e6
KEEPER_START_S, KEEPER_MIB = 0.06, 35.0
SMALL_EXTRA_S = 0.030
SMALL, MEDIUM, LARGE = "small-8000", "gpt2-124m", "gpt2-355m"
SIZES = {MEDIUM: "1.5 GB", LARGE: "4.3 GB"}
KEEPER_MEMORY, BUCKET_READS, FIRST_BYTE_S, COMPILED_SHARE = 0.8, 0.95, 0.15, 0.15
COMMIT_S = {1024: 0.3, 16384: 3.0}  # by number of ranks
"""Bounds that a benchmark also checks itself."""

Values = Mapping[str, float]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Measured value of a goal: the median with its range, or an estimate with its confidence interval.

    Attributes:
        date: day of the measurement, if the document does not state it beside the table.
        is_interval: the range is a confidence interval.
        others: processors that other programs used meanwhile, where it is known.
    """

    spread: Spread
    date: str = ""
    is_interval: bool = False
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """Bound of one number: it must be at most the bound or, with `at_least`, not under it.

    Attributes:
        what: the measured quantity.
        command: measures it.
        find: takes the value from the measurements; None if it is not in them.
        peer: takes the best value of others from the same measurements, with its name; "" if there is none.
        before: value before the work on starts and fast disks, measured from outside on another machine.
    """

    what: str
    bound: float
    unit: str
    command: str
    find: Callable[[Measurements], Found | None] = lambda _: None
    at_least: bool = False
    peer: Callable[[Measurements], str] = lambda _: ""
    before: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal with its measured value."""

    goal: Goal
    found: Found | None

    @property
    def passed(self) -> bool | None:
        """None if it was not measured, or if the confidence interval contains the bound."""
        if self.found is None:
            return None
        spread, bound = self.found.spread, self.goal.bound
        if self.found.is_interval and spread.least <= bound <= spread.most:
            return None
        return spread.median >= bound if self.goal.at_least else spread.median <= bound


class Measurements:
    """Results of one machine.

    Args:
        documents: by kind, which is the first part of a results file's name; each newest first.
    """

    def __init__(self, documents: Mapping[str, Sequence[Document]]) -> None:
        self._documents = documents
        self.saving, self._of_state = combine(dict(one) for one in documents.get("saving", ()))

    def newest(self, kind: str) -> Document | None:
        """Return the newest results of a kind."""
        found = self._documents.get(kind, ())
        return found[0] if found else None

    def date_of(self, state: str) -> str:
        """Return the day on which saves of a state were measured."""
        return _date(self._of_state[state])


def judge(measurements: Measurements, goals: Iterable[Goal] | None = None) -> list[Verdict]:
    """Return every goal with its measured value."""
    return [Verdict(goal, goal.find(measurements)) for goal in (GOALS if goals is None else goals)]


def _date(document: Document) -> str:
    return document["machine"]["date"][:10]


def _ours(state: str, ratio: Callable[[Values], float]) -> Callable[[Measurements], Found | None]:
    """A number of Holdfast's own runs, whose limits were measured beside it."""
    return _beside("holdfast", state, lambda own, _: ratio(own))


def _beside(
    peer: str, state: str, ratio: Callable[[Values, Values], float]
) -> Callable[[Measurements], Found | None]:
    """A number of Holdfast's runs and those of a peer in the same rounds."""

    def find(measurements: Measurements) -> Found | None:
        spread = measurements.saving.paired(state, "holdfast", peer, ratio)
        return None if spread is None else Found(spread, measurements.date_of(state))

    return find


def _training_lost(measurements: Measurements) -> Found | None:
    results: Results = measurements.saving
    found = results.training_lost_copies(MEDIUM, "holdfast")
    if found is None:
        return None
    others = statistics.median(one.others for one in results.comparisons(MEDIUM, "holdfast"))
    spread = Spread(found.estimate, found.low, found.high)
    return Found(spread, measurements.date_of(MEDIUM), is_interval=True, others=others)


def _of_runs(
    kind: str, values: Callable[[Document], Iterable[float]]
) -> Callable[[Measurements], Found | None]:
    """Numbers of the newest results of a kind."""

    def find(measurements: Measurements) -> Found | None:
        document = measurements.newest(kind)
        if document is None:
            return None
        spread = Spread.of(values(document))
        return None if spread is None else Found(spread, _date(document))

    return find


def _bucket_reads(document: Document) -> list[float]:
    """Return the ratio of each round, or the one of the medians in older results."""
    seconds: dict[tuple[int, str], float] = {
        (run["round"], run["operation"]): run["seconds"]
        for run in document.get("runs", ())
        if run["server"] == "null" and "round" in run
    }
    rounds = sorted({number for number, _ in seconds})
    pairs = [(seconds.get((one, "read_bare")), seconds.get((one, "read"))) for one in rounds]
    found = [bare / own for bare, own in pairs if bare is not None and own is not None]
    return found or [document["summary"]["null"]["read_ratio"]]


def _commit(layout: str, world_size: int) -> Goal:
    def times(document: Document) -> list[float]:
        rows = document["rows"]
        at = [row for row in rows if row["world_size"] == world_size and row["kind"] == layout]
        return [value for row in at for value in row["values"]["commit_s"]]

    what = f"commit of {world_size} ranks, {layout}"
    return Goal(what, COMMIT_S[world_size], "s", "benchmarks/scale.py", _of_runs("scale", times))


def _bucket_arrivals(case: str, way: str) -> Callable[[Measurements], Found | None]:
    """Find when a case was whole in a bucket, as a share of rclone's time, round by round."""

    def shares(document: Document) -> list[float]:
        times: dict[tuple[int, str], float] = {
            (run["round"], run["contestant"]): run["all_visible_s"]
            for run in document["writeback"]
            if run["case"] == case and run["way"] == way and run.get("all_visible_s")
        }
        rounds = sorted({number for number, _ in times})
        return [
            times[one, "holdfast"] / times[one, "rclone"]
            for one in rounds
            if (one, "holdfast") in times and (one, "rclone") in times
        ]

    return _of_runs("writeback", shares)


def _restarts(document: Document) -> list[float]:
    return [run["back_s"] for run in document["runs"] if run.get("way") == "node"]


def _sharding(document: Document) -> list[float]:
    """Return the median ratio of the slowest layout."""
    ratios = [
        statistics.median(a / b for a, b in zip(run["ours"]["s"], run["hand"]["s"], strict=True))
        for run in document["runs"]
    ]
    return [max(ratios)]


def _best_peer(
    state: str, unit: str, number: Callable[[Results, str], float | None], *, most: bool = False
) -> Callable[[Measurements], str]:
    """The least number of the others that saved a state, or the greatest one, with its name."""

    def find(measurements: Measurements) -> str:
        results = measurements.saving
        titles = {run["contestant"]: run["title"] for run in results.of(state)}
        found = [
            (value, titles[peer])
            for peer in results.contestants(state)
            if peer != "holdfast" and (value := number(results, peer)) is not None
        ]
        if not found:
            return ""
        value, title = max(found) if most else min(found)
        return f"{value:.3g} {unit}, {title}"

    return find


def _share_of_limit(key: str, limit: str, state: str) -> Callable[[Results, str], float | None]:
    """A peer's share of the raw speed that was measured in its round."""

    def find(results: Results, peer: str) -> float | None:
        spread = results.paired(state, "limits", peer, lambda limits, own: limits[limit] / own[key])
        return spread and spread.median

    return find


def _milliseconds_blocked(results: Results, state: str, peer: str) -> float | None:
    spread = results.spread(state, peer, "blocked_s")
    return spread and 1e3 * spread.median


def _copies_lost(results: Results, peer: str) -> float | None:
    found = results.training_lost_copies(MEDIUM, peer)
    return found and found.estimate


_SAVING = "benchmarks/run.py"
_STARTS = "benchmarks/starts.py"


def _start(
    what: str,
    bound: float,
    unit: str,
    ratio: Callable[[Values], float],
    peer: Callable[[Values], float] | None = None,
    **more: Any,
) -> Goal:
    """A number of a fresh process with 1.5 GB of plain tensors, beside the limits of its round.

    `peer` is the same number of safetensors, which verifies nothing.
    """

    def numbers(of: Callable[[Values], float]) -> Callable[[Measurements], Found | None]:
        return _of_runs("starts", lambda document: map(of, document["runs"]))

    def of_peer(measurements: Measurements) -> str:
        found = numbers(peer)(measurements) if peer else None
        return f"{found.spread.median:.3g} {unit}, safetensors" if found else ""

    return Goal(what, bound, unit, _STARTS, numbers(ratio), peer=of_peer, **more)


def _of_size(state: str) -> tuple[Goal, ...]:
    """Goals of a state with its optimizer."""
    size = SIZES[state]
    return (
        Goal(
            f"save() blocks, {size} owned by an optimizer",
            2.0 if state == MEDIUM else 3.0,
            "ms",
            _SAVING,
            _ours(state, lambda own: own["blocked_s"] * 1e3),
            peer=_best_peer(state, "ms", lambda results, peer: _milliseconds_blocked(results, state, peer)),
            before="3.5 to 7 ms" if state == MEDIUM else "8 to 13 ms",
        ),
        Goal(
            f"save() blocks, {size} of averages, written after each step",
            0.5,
            "copies",
            _SAVING,
            _ours(state, lambda own: own["averages_blocked_s"] / own["averages_copy_s"]),
        ),
        Goal(
            f"save() blocks, {size} that nothing owns, without steps",
            0.5,
            "copies",
            _SAVING,
            _ours(state, lambda own: own["unowned_blocked_s"] / own["unowned_copy_s"]),
            before="1.1 to 2 copies" if state == MEDIUM else "",
        ),
        Goal(
            f"durable, {size}, share of raw write",
            0.97,
            "x",
            _SAVING,
            _ours(state, lambda own: own["near_write_s"] / (own["durable_s"] - own["staged_s"])),
            at_least=True,
            peer=_best_peer(state, "x", _share_of_limit("durable_s", "write_s", state), most=True),
            before="0.61 to 0.67 x (at 3.8 GB/s)" if state == MEDIUM else "",
        ),
        Goal(
            f"cold verified restore, {size}, share of raw read",
            0.95,
            "x",
            _SAVING,
            _ours(state, lambda own: own["near_read_s"] / own["load_cold_s"]),
            at_least=True,
            peer=_best_peer(state, "x", _share_of_limit("load_cold_s", "read_s", state), most=True),
        ),
        Goal(
            f"first save of a process blocks, {size}, beside later ones",
            2.0,
            "x",
            _SAVING,
            _ours(state, lambda own: own["first_blocked_s"] / own["blocked_s"]),
        ),
        Goal(
            f"first save of a process durable, {size}, beside later ones",
            2.0,
            "x",
            _SAVING,
            _ours(state, lambda own: own["first_durable_s"] / own["durable_s"]),
        ),
    )


def _of_nebula(state: str) -> tuple[Goal, ...]:
    """Claims of Nebula: 95 % to 99.9 % of the time of a save, for three copies of the state in memory."""
    size = SIZES[state]
    share = _beside("torch-save", state, lambda own, peer: own["blocked_s"] / peer["blocked_s"])
    return (
        Goal(f"Nebula's 95 %: save() blocks, {size}, share of torch.save", 0.05, "x", _SAVING, share),
        Goal(f"Nebula's 1000 times: save() blocks, {size}, share of torch.save", 0.001, "x", _SAVING, share),
        Goal(
            f"memory of a save, {size}, in 1.05 states + 60 MB (Nebula: 3 states)",
            1.0,
            "x",
            _SAVING,
            _ours(state, lambda own: own["extra_bytes"] / (1.05 * own["state_bytes"] + KEEPER_BYTES)),
        ),
    )


GOALS = (
    _start(
        "import and construction beyond `import torch`, no optimizer",
        FIRST_BYTE_S,
        "s",
        lambda run: run["construct_s"],
        before="1.4 to 1.8 s",
    ),
    _start(
        "the same, after an optimizer was made",
        FIRST_BYTE_S,
        "s",
        lambda run: run["construct-optimizer_s"],
        before="0.47 to 0.6 s",
    ),
    _start(
        "`import torch` to restored, warm, share of torch.load's time",
        1.0,
        "x",
        lambda run: run["holdfast_warm_s"] / run["torch.load_warm_s"],
        lambda run: run["safetensors_warm_s"] / run["torch.load_warm_s"],
        before="2.3 to 5 x",
    ),
    _start(
        "`import torch` to restored, cold, in raw reads",
        1.1,
        "x",
        lambda run: run["holdfast_cold_s"] / run["raw_read_s"],
        lambda run: run["safetensors_cold_s"] / run["raw_read_s"],
        before="1.9 to 2.4 x",
    ),
    _start(
        "first restore of a process, cold, share of raw read",
        0.95,
        "x",
        lambda run: run["raw_read_s"] / run["restore_cold_s"],
        lambda run: run["raw_read_s"] / run["safetensors_cold_s"],
        at_least=True,
        before="0.57 x",
    ),
    _start(
        "first restore of a process, warm, share of memcpy",
        0.6,
        "x",
        lambda run: run["memcpy_s"] / run["restore_warm_s"],
        at_least=True,
        before="0.2 to 0.35 x",
    ),
    _start(
        "first finished step of a resumed training, beyond a plain one",
        0.2,
        "s",
        lambda run: run["step_s"] - run["step-plain_s"],
    ),
    _start("start of a keeper", KEEPER_START_S, "s", lambda run: run["keeper_s"]),
    _start("memory of a keeper, without arenas", KEEPER_MIB, "MiB", lambda run: run["keeper_mib"]),
    Goal(
        "training lost per save, 1.5 GB",
        1.0,
        "copies",
        _SAVING,
        _training_lost,
        peer=_best_peer(MEDIUM, "copies", _copies_lost),
        before="3.4 to 8 copies",
    ),
    *_of_size(MEDIUM),
    *_of_size(LARGE),
    Goal(
        "8000 tensors of 8 KiB durable, in 2 raw writes + 30 ms",
        0.7,
        "x",
        _SAVING,
        _ours(SMALL, lambda own: own["durable_s"] / (2 * own["near_write_s"] + SMALL_EXTRA_S)),
        before="0.8 x",
    ),
    Goal(
        "restore from the keeper's memory, share of memcpy",
        KEEPER_MEMORY,
        "x",
        "benchmarks/tiers.py",
        _of_runs("tiers", lambda found: [run["memory_of_memcpy"] for run in found["tiers"]]),
        at_least=True,
    ),
    Goal(
        "verified reads from a bucket, share of the bare client",
        BUCKET_READS,
        "x",
        "benchmarks/remote.py",
        _of_runs("remote", _bucket_reads),
        at_least=True,
        before="0.91 x",
    ),
    Goal(
        "from `import holdfast` to the first byte, nothing cached, beyond `import torch`",
        FIRST_BYTE_S,
        "s",
        "benchmarks/firstbyte.py",
        _of_runs("firstbyte", lambda found: [run["cold_s"] for run in found["runs"]]),
    ),
    *(_commit(layout, size) for size in COMMIT_S for layout in ("fsdp", "hsdp", "fsdp-tp", "pipeline")),
    *_of_nebula(MEDIUM),
    *_of_nebula(LARGE),
    Goal(
        "SkyPilot's MOUNT_CACHED: a checkpoint whole in the bucket, share of rclone's time",
        1.0,
        "x",
        "benchmarks/writeback.py",
        _bucket_arrivals("checkpoint", "straight"),
    ),
    Goal(
        "SkyPilot's MOUNT_CACHED: 200 files of 4 KiB in the bucket, slow network, share of rclone's time",
        1.2,
        "x",
        "benchmarks/writeback.py",
        _bucket_arrivals("many small", "10 MB/s a connection"),
        before="2.5 to 2.7 x",
    ),
    Goal(
        "SkyPilot's restarts: kill -9 of a node until its command runs again",
        2.0,
        "s",
        "benchmarks/recovering.py",
        _of_runs("recovering", _restarts),
    ),
    Goal(
        "PyTorch's FSDP: a step under holdfast.shard, beside fully_shard by hand, slowest layout",
        1.03,
        "x",
        "benchmarks/sharding.py",
        _of_runs("sharding", _sharding),
    ),
    Goal(
        "SageMaker's compiler: processor time of a compiled restart, share of the first start",
        COMPILED_SHARE,
        "x",
        "benchmarks/compiled.py",
        _of_runs("compiled", lambda found: [found["medians"]["share"]]),
    ),
)
OF_SAVING = tuple(goal for goal in GOALS if goal.command == _SAVING)
