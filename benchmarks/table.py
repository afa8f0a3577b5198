"""Write the tables of the newest results between the markers of a Markdown file."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chart
import columns
import engines
import replayed
import sharded
import trainers
from goals import BUCKET_READS, COMPILED_SHARE, GOALS, KEEPER_MEMORY, Measurements, Verdict, judge
from resharded import HEADINGS
from resharded import rows as resharded_rows
from results import combine

sys.path.append(str(Path(__file__).resolve().parents[1]))
from campaigns import counts

RESULTS = Path(__file__).resolve().parent / "results"
TITLES = {
    "gpt2-124m": "GPT-2 124M with AdamW, fp32",
    "gpt2-355m": "GPT-2 355M with AdamW, fp32",
    "small-8000": "8000 tensors of 8 KiB",
}
SCALE = {
    "plan_s": ("plan of a save, each rank", 1e3, "ms"),
    "part_s": ("part, each rank", 1e3, "ms"),
    "part_bytes": ("part, size", 1e-3, "kB"),
    "commit_s": ("commit, rank 0", 1.0, "s"),
    "commit_again_s": ("commit of a structure seen before", 1.0, "s"),
    "commit_cpu_s": ("commit, processor time", 1.0, "s"),
    "restore_plan_s": ("plan of a restore on 3/4 of the ranks", 1.0, "s"),
    "parts_read": ("parts that it reads", 1.0, ""),
    "place_s": ("holders of copies, each rank", 1e3, "ms"),
    "commit_grown_bytes": ("memory of a commit", 1e-6, "MB"),
    "plan_grown_bytes": ("memory of plan and part", 1e-6, "MB"),
    "restore_grown_bytes": ("memory of a restore's plan", 1e-6, "MB"),
    "place_grown_bytes": ("memory of the holders", 1e-6, "MB"),
}
"""Quantities of `scale.py`: label, factor and unit."""
STARTS = (
    ("construct_s", "import and construction, no optimizer", "0.15 s"),
    ("construct-optimizer_s", "import and construction, after an optimizer", "0.15 s"),
    ("holdfast_warm_s", "restored, files in memory", "memcpy_s"),
    ("holdfast_cold_s", "restored, files on disk only", "raw_read_s"),
    ("restore_warm_s", "the restore alone, files in memory", "memcpy_s"),
    ("restore_cold_s", "the restore alone, files on disk only", "raw_read_s"),
    ("step_s", "a small training that resumes, to its first step", "step-plain_s"),
    ("keeper_s", "start of a keeper", "0.06 s"),
)
"""For each quantity its key, label, and the limit or its key."""
UNMEASURED = ("engines",)
"""Kinds whose table names the command until there are results."""
OWN_GOALS = ("standby", "goodput", "simulated")
REAL = ("gpt2-124m", "gpt2-355m")


def main() -> int:
    """Rewrite the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("markdown", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a table is not the newest"
    )
    options = parser.parse_args()
    before = text = options.markdown.read_text()
    asked = [name for name in RENDERERS if f"<!-- {name} -->" in text.splitlines()]
    if not asked:
        markers = ", ".join(f"<!-- {name} -->" for name in RENDERERS)
        sys.stderr.write(f"{options.markdown} has none of the lines {markers}; nothing was changed.\n")
        return 1
    is_whole = True
    for name in asked:
        kind = name.partition(" ")[0]
        documents = _documents_of(kind)
        if documents or kind in UNMEASURED:
            text = insert(text, RENDERERS[name](documents), name, what=str(options.markdown))
        else:
            sys.stderr.write(f"No {kind} results in {RESULTS}: its table is left as it is. Run it first.\n")
            is_whole = False
    if options.check:
        return 0 if is_whole and text == before else 1
    options.markdown.write_text(text)
    return 0 if is_whole else 1


def _documents_of(kind: str) -> list[dict[str, Any]]:
    if kind == "reliability":
        return list(counts.read_all().values())
    if kind == "goals":  # the machine of these tables' own goals need not be that of all others
        return [one for one in read_results(RESULTS) if one["kind"] not in OWN_GOALS]
    if kind == "trainers":  # each is compared with its own stock way, on whichever machine
        return read_results(RESULTS, f"{kind}_*.json")
    return newest(RESULTS, "saving" if kind == "training" else kind)


def newest(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Results of a kind from the machine that was measured last, newest first; quick runs do not count."""
    full = read_results(folder, f"{kind}*_*.json")
    return [document for document in full if hardware_of(document) == hardware_of(full[0])]


def read_results(folder: Path, pattern: str = "*_*.json") -> list[dict[str, Any]]:
    """Results of all machines, newest first, each with its kind; quick runs do not count."""
    found = []
    for path in folder.glob(pattern):
        document = json.loads(path.read_text())
        if not document.get("quick"):
            found.append(document | {"kind": re.split("[-_]", path.name)[0]})
    return sorted(found, key=lambda document: document["machine"]["date"], reverse=True)


def hardware_of(document: dict[str, Any]) -> list[Any]:
    """Return the facts in which machines of the same hardware are equal."""
    return [document["machine"][key] for key in ("cpu", "cores", "memory_bytes", "disk")]


def insert(text: str, table: str, kind: str, *, what: str) -> str:
    """`text` with everything between the markers of a kind replaced by `table`.

    Raises:
        ValueError: the markers are not there, each once and on a line of its own, in order.
    """
    begin, end = f"<!-- {kind} -->", f"<!-- /{kind} -->"
    lines = text.splitlines()
    if lines.count(begin) != 1 or lines.count(end) != 1 or lines.index(begin) > lines.index(end):
        message = f"{what} needs the lines {begin} and {end} once each, in this order; nothing was changed."
        raise ValueError(message)
    head, tail = lines[: lines.index(begin) + 1], lines[lines.index(end) :]
    return "\n".join([*head, table, *tail]) + "\n"


def render_resharding(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest resharding result: one table, ranks in its columns."""
    document = documents[0]
    facts = f"_{columns.facts(document['machine'], document['rounds'])}_"
    return f"{facts}\n\n" + _table(["", *HEADINGS], resharded_rows(document["runs"]))


def render_sharding(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest sharding result: a line for each layout."""
    document = documents[0]
    facts = f"_{columns.facts(document['machine'], document['rounds'])}_"
    return f"{facts}\n\n" + _table(["", *sharded.HEADINGS], sharded.rows(document["runs"]))


def render_trainers(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest result of each trainer: a line for each method."""
    source: dict[str, dict[str, Any]] = {}
    for document in documents:  # the newest first
        for run in document["runs"]:
            source.setdefault(run["trainer"], document)
    used = [document for document in documents if document in source.values()]
    runs = [run for document in used for run in document["runs"] if source[run["trainer"]] is document]
    facts = "\n\n".join(_trainer_facts(one, [name for name in source if source[name] is one]) for one in used)
    return f"{facts}\n\n" + _table([*trainers.HEADINGS], trainers.rows(runs))


def render_goodput(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest replay of traces: how, goodput, parts of pauses, goals."""
    document = documents[0]
    how = f"load {document['machine']['load_before']:.1f} before and {document['load_after']:.1f} after"
    facts = f"_{columns.facts(document['machine'], document['rounds'])}; {how}_"
    tables = [
        _table([*replayed.HEADINGS], replayed.rows(document)),
        _table([*replayed.TRACE_HEADINGS], replayed.trace_rows(document)),
        _table([*replayed.PAUSE_HEADINGS], replayed.pause_rows(document)),
        _table(
            ["goal", "bound", "found", "measured", ""],
            [list(columns.verdict(one)) for one in replayed.judge(document)],
        ),
    ]
    return "\n\n".join([facts, *tables])


def _trainer_facts(document: dict[str, Any], names: list[str]) -> str:
    packages = document["machine"]["packages"]
    modules = [trainers.FRAMEWORKS[name] for name in names]
    versions = [f"{one} {packages[one]}" for one in trainers.MODULES if one in modules and packages.get(one)]
    facts = columns.facts(document["machine"], rounds=None)
    return f"_{', '.join(names)}: {facts}_" + (f"\n\n{', '.join(versions)}" if versions else "")


def render_saving(documents: list[dict[str, Any]]) -> str:
    """The Markdown of saving results: for each state a table of its newest, the limits, and all goals."""
    results, measured = combine(documents)
    parts = list(dict.fromkeys(one["note"] for one in measured.values() if one.get("note")))
    for state in results.states():
        document = measured[state]
        rounds = len({run["round"] for run in results.of(state)})  # a run may have had no time for all
        parts.append(f"_{columns.facts(document['machine'], rounds)}_")
        headings = [f"**{TITLES.get(state, state)}**", *(column.heading for column in columns.COLUMNS)]
        parts.append(_table(headings, columns.rows(results, state)))
        parts.append(f"Limits: {columns.limits(results, state)}.")
    return "\n\n".join(parts)


def render_engines(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest run of other projects' engines: a line for each, and the limits."""
    if not documents:
        return "Not measured yet: `benchmarks/run.py --others`."
    results, measured = combine(documents)
    parts = []
    for state in results.states():
        document = measured[state]
        parts.append(f"_{columns.facts(document['machine'], document['rounds'])}_")
        headings = [f"**{TITLES.get(state, state)}**", *engines.HEADINGS]
        parts.append(_table(headings, engines.rows(results, state)))
        parts.append(f"Limits: {columns.limits(results, state)}.")
    return "\n\n".join(parts)


def render_engines_in_short(documents: list[dict[str, Any]]) -> str:
    """The Markdown of the newest run of other projects' engines: medians, and whether bytes are right."""
    results, measured = combine(documents)
    state = results.states()[0]
    headings = [f"**{TITLES.get(state, state)}**", *engines.HEADINGS_OF_MEDIANS]
    table = _table(headings, engines.rows_of_medians(results, state))
    return f"_{columns.facts(measured[state]['machine'], rounds=None)}_\n\n{table}"


def render_training_lost(documents: list[dict[str, Any]]) -> str:
    """The cost of a save in a training, as a sentence."""
    results, measured = combine(documents)
    return columns.training_lost(results, REAL[0], measured[REAL[0]]["machine"])


def by_kind(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return results by their kind, in the given order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        found.setdefault(document["kind"], []).append(document)
    return found


def render_goals(documents: list[dict[str, Any]]) -> str:
    """The Markdown of all goals in one table: the machine measured last, and others for what it lacks."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for document in documents:  # the newest first
        machines.setdefault(json.dumps(hardware_of(document)), []).append(document)
    measured = [(found[0]["machine"], Measurements(by_kind(found))) for found in machines.values()]
    measured = [one for one in measured if any(verdict.found for verdict in judge(one[1]))]
    rows = []
    for goal in GOALS:
        facts, values = next((one for one in measured if goal.find(one[1])), measured[0])
        what, bound, found, date, outcome = columns.verdict(Verdict(goal, goal.find(values)))
        where = "" if facts is measured[0][0] or found == columns.NONE else f", {facts['cpu']}"
        rows.append([what, bound, goal.peer(values) or "-", goal.before or "-", found, date + where, outcome])
    headings = ["goal", "bound", "best of others", "before", "found", "measured", ""]
    return f"_{columns.hardware(measured[0][0])}_\n\n" + _table(headings, rows)


def render_in_short(documents: list[dict[str, Any]]) -> str:
    """The Markdown of what most readers ask: medians for the real states, one table."""
    results, measured = combine(documents)
    lines = []
    for state in (state for state in results.states() if state in REAL):
        lines.append([f"**{TITLES[state]}**", *[""] * len(columns.SHORT)])
        lines += columns.rows_in_short(results, state)
    document = measured[results.states()[0]]
    facts = f"_{columns.facts(document['machine'], rounds=None)}_"
    table = _table(["", *(column.heading for column in columns.SHORT)], lines)
    return "\n\n".join([facts, *filter(None, [document.get("note")]), table])


def render_numbers(labels: Mapping[str, str]) -> Callable[[list[dict[str, Any]]], str]:
    """A renderer of results that are a few medians: those named, with what they are and their goal."""

    def render(documents: list[dict[str, Any]]) -> str:
        document = documents[0]
        medians = document.get("medians") or document["summary"]["null"]
        rows = [[label, f"{medians[key]:.3g}"] for key, label in labels.items()]
        return f"_{columns.facts(document['machine'], rounds=None)}_\n\n" + _table(["", "found"], rows)

    return render


def render_delta(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `delta.py`: the share of the plain bytes by training and way, and the ways' speeds."""
    document = documents[0]
    rows, ways = document["rows"], list(dict.fromkeys(row["way"] for row in document["rows"]))
    shares = []
    for case in dict.fromkeys((row["dtype"], row["rate"], row["steps"]) for row in rows):
        mine = {r["way"]: r["share"] for r in rows if (r["dtype"], r["rate"], r["steps"]) == case}
        shares.append([*map(str, case), *(f"{mine[way]:.2f}" for way in ways)])
    speeds = [
        [what, *(f"{statistics.median(row[key] for row in rows if row['way'] == way):.0f}" for way in ways)]
        for what, key in (("packed, MB/s", "pack_mb_s"), ("unpacked, MB/s", "unpack_mb_s"))
    ]
    return "\n\n".join(
        [
            f"_{columns.facts(document['machine'], rounds=None)}_",
            _table(["state", "learning rate", "steps after the base", *ways], shares),
            _table(["medians, of one core", *ways], speeds),
        ]
    )


def render_slow_link(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `slow_link.py`: a line for each link, with and without compression."""
    document = documents[0]
    names = ["training", "link", "compressed", "file", "sent for a save"]
    names += ["in home after", "of a core", "restored in"]
    found = [
        [
            row["training"],
            f"{row['link_mb_s']:.0f} MB/s",
            "yes" if row["compress"] else "no",
            *(f"{row[key]:.0f} MB" for key in ("plain_mb", "sent_mb")),
            *(f"{row[key]:.1f} s" for key in ("in_home_s", "core_s", "restore_s")),
        ]
        for row in document["rows"]
    ]
    return f"_{columns.facts(document['machine'], rounds=None)}_\n\n" + _table(names, found)


def render_simulated(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `simulate.py`: goodput by interval and way, and the simulation beside the replays."""
    document = documents[0]
    rows, ways = document["rows"], list(dict.fromkeys(row["way"] for row in document["rows"]))
    found = []
    for trace, interval_s in dict.fromkeys((row["trace"], row["interval_s"]) for row in rows):
        mine = {r["way"]: r["goodput"] for r in rows if (r["trace"], r["interval_s"]) == (trace, interval_s)}
        found.append([trace, f"{interval_s // 60} min", *(f"{mine[way]:.3f}" for way in ways)])
    checked = [
        [one["trace"], one["contestant"], f"{one['replayed']:.3f}", f"{one['simulated']:.3f}"]
        for one in document["checked"]
    ]
    return "\n\n".join(
        [
            f"_{columns.facts(document['machine'], rounds=None)}_",
            _table(["failures of", "saves in home every", *ways], found),
            _table(["replayed trace", "tool", "goodput replayed", "simulated"], checked),
        ]
    )


def render_starts(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `starts.py`: for each quantity the limit, two peers, an older version, and now."""
    document = documents[0]
    found = document["medians"]

    def seconds(key: str) -> str:
        return f"{found[key]:.3f} s" if key in found else "-"

    rows = []
    for key, label, limit in STARTS:
        kind = key.partition("_")[2]  # warm_s or cold_s
        peers = [seconds(f"{peer}_{kind}") for peer in ("torch.load", "safetensors")]
        limit = limit if " " in limit else seconds(limit)
        rows.append([label, limit, *peers, seconds(f"before_{key}"), seconds(key)])
    facts = f"_{columns.facts(document['machine'], rounds=len(document['runs']))}_"
    return f"{facts}\n\n" + _table(["", "limit", "torch.load", "safetensors", "before", "now"], rows)


def render_crowded(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `crowded.py`: a line for each number of ranks."""
    rows = [
        [
            f"{row['ranks']:.0f}",
            f"{row['num_bytes'] / 1e9:.2f} GB",
            f"{1e3 * row['blocked_s']:.1f} ms",
            f"{row['staged_s']:.2f} s",
            f"{row['durable_s']:.2f} s",
            *(f"{row[key]:.0%}" for key in ("core", "disk", "memory")),
        ]
        for row in documents[0]["rows"]
    ]
    headings = ["ranks", "a save", "the call blocks", "copied", "durable", "keepers' core", "disk", "memory"]
    facts = columns.facts(documents[0]["machine"], rounds=None)
    return f"_{facts}_\n\n" + _table(headings, rows)


def render_scale(documents: list[dict[str, Any]]) -> str:
    """The Markdown of `scale.py`: a line for each layout and quantity, with a column for each world."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in (row for document in documents for row in document["rows"]):
        values = {key: statistics.median(spread) for key, spread in row["values"].items()}
        found.setdefault((row["kind"], row["world_size"]), values)
    worlds = sorted({world for _, world in found})
    rows = [
        [kind, label, *(_scaled(found.get((kind, world), {}).get(key), factor, unit) for world in worlds)]
        for kind in sorted({kind for kind, _ in found})
        for key, (label, factor, unit) in SCALE.items()
    ]
    loads = [row["load"] for row in documents[0]["rows"] if "load" in row]
    busy = f"; load of other programs {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    facts = columns.facts(documents[0]["machine"], rounds=None) + busy
    headings = ["layout", "", *(f"{world} ranks" for world in worlds)]
    return f"_{facts}_\n\n" + _table(headings, rows)


def _scaled(value: float | None, factor: float, unit: str) -> str:
    return "-" if value is None else f"{value * factor:.3g} {unit}".rstrip()


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


RENDERERS = {
    "reliability": lambda _: counts.render(),
    "reliability in short": lambda _: counts.render_in_short(),
    "goals": render_goals,
    "training lost": render_training_lost,
    "saving": render_saving,
    "saving in short": render_in_short,
    "saving chart": chart.render,
    "engines": render_engines,
    "engines in short": render_engines_in_short,
    "resharding": render_resharding,
    "sharding": render_sharding,
    "scale": render_scale,
    "starts": render_starts,
    "crowded": render_crowded,
    "trainers": render_trainers,
    "goodput": render_goodput,
    "tiers": render_numbers(
        {
            "memory_s": "seconds to restore from the keeper's memory after kill -9 of the trainer",
            "cold_s": "seconds to restore from the local disk, nothing cached",
            "memory_of_memcpy": f"share of the speed of a copy in memory (goal: at least {KEEPER_MEMORY})",
            "cold_of_memory": "times faster than from the disk (goal: at least 3)",
        }
    ),
    "remote": render_numbers(
        {
            "put_ratio": "upload, share of the bare client's speed (goal: at least 0.9)",
            "read_ratio": f"verified reads, share of the bare client's speed (goal: at least {BUCKET_READS})",
            "read_cpu_ratio": "the same in processor time of the client's process",
            "put_extra_bytes": "bytes over the arena during an upload of 2 GiB (goal: at most 64 MB)",
        }
    ),
    "compiled": render_numbers(
        {
            "cold_cpu_s": "processor time of the first start, compilers included, in seconds",
            "kept_cpu_s": "restart on the same machine",
            "restored_cpu_s": "restart on an empty machine, with the cache from home",
            "share": f"the same as a share of the first start (goal: at most {COMPILED_SHARE})",
            "cold_compiler_calls": "calls of the C++ compiler at the first start",
            "restored_compiler_calls": "at the restart on an empty machine",
            "home_bytes": "bytes of the cache in home",
        }
    ),
    "recovering": render_numbers(
        {
            "node_s": "seconds from kill -9 of a node until the job's first command runs (goal: under 2)",
            "node_worst_s": "the slowest of them",
            "process_s": "the same after kill -9 of the job's process alone (goal: under 2)",
            "controller_s": "the same for controller and node, from the next look at jobs (goal: under 2)",
            "notice_s": "from a notice of 30 s, with the step under way, the save and the training's own end",
            "own_start_s": "the training's own start after that: Python, torch, restore, first step",
            "lost_with_notice": "steps lost by a preemption with notice, at most (goal: 0)",
            "lost_without": "steps lost by kill -9 of a node, at most, with a save every 20 steps",
        }
    ),
    "delta": render_delta,
    "slowlink": render_slow_link,
    "simulated": render_simulated,
    "standby": render_numbers(
        {
            way: f"seconds from the kill to the next step: {way}{goal}"
            for way, goal in (
                *((one, "") for one in ("python", "torchrun")),
                ("python with a standby", " (goal: under 1)"),
                *((one, "") for one in ("torchrun with a standby", "python with a standby, slowest")),
                *((one, "") for one in ("python, supervised", "2 ranks of torchrun")),
                *((f"2 ranks of torchrun{one}", "") for one in (" with standbys", ", supervised")),
            )
        }
    ),
    "losthost": render_numbers(
        {
            "memory_s": "seconds of `restore()`: both trainers were killed, their memory is left",
            "peer_s": "one of two hosts was lost, with its memory and its disk",
            "disk_s": "both memories were lost, the local folders are read from the disk",
            "home_s": "both hosts were lost, home is read from the same disk",
        }
    ),
    "elastic": render_numbers(
        {
            f"{way}, {name}": f"{what}: {way}"
            for way in ("torchrun", "torchrun with standbys")
            for name, what in (
                ("lost_s", "seconds from the loss of a host until the next step on three"),
                ("back_s", "seconds between the last step on three hosts and the first on four"),
            )
        }
    ),
    "draining": render_numbers(
        {
            "quiet_s": "seconds of 20 training steps",
            "drain_s": "with a drain of 1.5 GB in them",
            "bare_s": "with the bare client sending the same file",
            "beyond_bare": "the drain's slow-down beyond the bare client's (goal: at most 0.03)",
        }
    ),
}


if __name__ == "__main__":
    sys.exit(main())
