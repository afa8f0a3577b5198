"""Findings from measurements, each with its source line, cost and change, and their report; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from holdfast.system.documents import to_plain
from holdfast.system.units import format_duration, plural
from holdfast.train.lengths import Padding, compare_paddings
from holdfast.train.tuning import measurements
from holdfast.train.tuning.measurements import CompileVerdict, SourceLine, StepMeasurements, Throughput

MIN_WAIT_SHARE = 0.10  # smallest share of a step spent waiting for data that is a finding
_MIN_SHARE_OF_STEPS = 0.25  # rarer syncs are ordinary logging
_NOTICEABLE = 0.01  # of a step: smallest cost to give in seconds
_MIN_RECOMPILES = 3  # fewer are normal: the compiler learns which sizes change


class Finding(Struct, frozen=True):
    """One suggested change."""

    kind: str
    place: SourceLine | None
    seen: str
    costs: str
    change: str
    after: str  # the value after the change: measured, or the best case
    share: float | None = None  # of a step's time that it costs, if measured


_READ = "Keep the tensor (`.detach()`), and read it every so many steps"
_GATHER = f"{_READ}; gather results on the device and move them once."
_CHANGES = {
    ".item()": f"{_READ}: `if step % 50 == 0: ... .item()`.",
    "float()": f"{_READ}; sums can be kept on the device: `total += loss.detach()`.",
    "int()": f"{_READ}.",
    "print()": f"{_READ}: `if step % 50 == 0: print(...)`.",
    **dict.fromkeys((".tolist()", ".numpy()", ".cpu()", ".to('cpu')"), _GATHER),
    "bool()": "Choose on the device: `torch.where(condition, a, b)` instead of `if`.",
    "in": "Compare on the device: `(x == value).any()` goes into `torch.where`.",
    "x[mask]": "Keep the shape: `torch.where(mask, x, 0)` or `x * mask`, and divide by `mask.sum()`.",
    ".masked_select()": "Keep the shape: `torch.where(mask, x, 0)` or `x * mask`.",
    ".nonzero()": "Keep the mask and compute with it, or give the count: `torch.nonzero_static`.",
    ".repeat_interleave()": "Pass `output_size=`, so that nothing has to be counted.",
}
_OTHERWISE = "Do it every so many steps, or outside of the step."


def find_syncs(syncs: measurements.SyncMeasurements, step_s: float) -> list[Finding]:
    """Find lines that make the host wait in most steps. Occasional syncs are not findings."""
    found = []
    for sync in syncs.found:
        if sync.num_steps < max(2, _MIN_SHARE_OF_STEPS * syncs.num_steps):
            continue
        each_s, times = (total / max(1, syncs.num_steps) for total in (sync.seconds, sync.num_times))
        is_each = sync.num_steps >= syncs.num_steps - 1  # code after the last step is not watched
        frequency = "every step" if is_each else f"{sync.num_steps} of {plural(syncs.num_steps, 'step')}"
        library = f", by {sync.inside.file}:{sync.inside.line}" if sync.inside else ""
        count = f", {times:.0f} times" if times > 1.5 else ""
        where = " in the model" if sync.in_forward else ""
        is_long = each_s > _NOTICEABLE * step_s
        costs = f"the host waits {format_duration(each_s)} per step"
        if syncs.device == "cpu":
            cost = f"{format_duration(each_s)} per step" if is_long else "nothing"
            costs = f"{cost} on this CPU; on a GPU the host waits until the device has finished its queue"
        after = f"at best {format_duration(max(0.0, step_s - each_s))} per step" if is_long else "no wait"
        change = _CHANGES.get(sync.kind, _OTHERWISE)
        seen = f"{sync.kind}{where} in {frequency}{count}{library}"
        share = each_s / step_s if step_s else None
        found.append(Finding("sync", sync.place, seen, costs, change, after, share))
    return found


def find_breaks(graphs: measurements.GraphMeasurements, syncs: Sequence[Finding]) -> list[Finding]:
    """Find lines that break the model's graph, merged with syncs of the same line."""
    by_place = {sync.place: sync for sync in syncs}
    costs = f"the model compiles to {plural(graphs.num_graphs, 'graph')}; nothing is fused across a break"
    found = []
    for broken in graphs.breaks:
        seen = f"the graph breaks here: {broken.reason}"
        if sync := by_place.get(broken.place):
            seen, change, share = f"{seen}; {sync.seen}", sync.change, sync.share
        else:
            change, share = "Move it out of the model's forward, or use it for debugging only.", None
        found.append(Finding("graph break", broken.place, seen, costs, change, "no break", share))
    return found


def exclude_lines(findings: Iterable[Finding], others: Iterable[Finding]) -> list[Finding]:
    """Return the findings on lines without a finding in `others`."""
    taken = {one.place for one in others}
    return [one for one in findings if one.place not in taken]


def find_recompiles(graphs: measurements.GraphMeasurements, num_shapes: int) -> list[Finding]:
    """Find functions that are compiled repeatedly."""
    found = []
    for recompile in graphs.recompiles:
        if recompile.num_times < _MIN_RECOMPILES and not recompile.hit_limit:
            continue
        why = recompile.reasons[0] if recompile.reasons else "unknown"
        if recompile.is_shape:
            seen = f"`{recompile.function}` is recompiled for new shapes ({num_shapes} distinct ones): {why}"
            change = (
                "Pad to a multiple or use buckets, so that few shapes occur; or compile one graph for all of "
                "them: `dynamic=None` or `True`, `torch._dynamo.mark_dynamic`."
            )
        else:
            seen = f"`{recompile.function}` is recompiled because a constant in its graph changed: {why}"
            change = "Keep values that change in every step out of the model, or make them tensors (buffers)."
        given_up = "; then the compiler gave up, and it runs eagerly" if recompile.hit_limit else ""
        costs = f"recompiled {recompile.num_times} times in {plural(graphs.num_steps, 'step')}{given_up}"
        found.append(Finding("recompile", recompile.place, seen, costs, change, "compiled once"))
    return found


class TrialResult(Struct, frozen=True):
    """Measurements of the training with another number of loader workers, from a real run."""

    num_workers: int
    step_s: float = 0.0
    wait_share: float = 0.0
    noise: float = 0.0
    failure: str = ""


def find_input(steps: StepMeasurements, now: Throughput, trials: Sequence[TrialResult]) -> list[Finding]:
    """Find a data loader that the steps wait for."""
    loader = steps.loader
    if loader is None or now.wait_share < MIN_WAIT_SHARE:
        return []
    waited_s = now.wait_share * now.step_s
    seen = (
        f"{now.wait_share:.0%} of a step is spent waiting for the data loader "
        f"(num_workers={loader.num_workers})"
    )
    costs = f"{format_duration(waited_s)} of {format_duration(now.step_s)} per step"
    ran = [one for one in trials if not one.failure]
    tried = ", ".join(f"{one.num_workers}: {format_duration(one.step_s)}" for one in ran)
    best = min(ran, key=attrgetter("step_s"), default=None)
    if best is not None and best.step_s < now.step_s * (1 - max(now.noise, best.noise)):
        change = f"`num_workers={best.num_workers}` (measured per step: {tried})."
        after = f"{format_duration(best.step_s)} per step, {best.wait_share:.0%} waiting (measured)"
        return [Finding("input", loader.place, seen, costs, change, after, 1 - best.step_s / now.step_s)]
    reason = f"more workers are not faster here ({tried})" if tried else "other num_workers were not tried"
    if loader.is_iterable:
        reason = "its dataset is a stream: each worker reads all of it unless you divide it"
    change = f"Do less work per sample: prepare the data once, before training ({reason})."
    after = f"at best {format_duration(now.step_s - waited_s)} per step"
    return [Finding("input", loader.sample_code or loader.place, seen, costs, change, after, now.wait_share)]


_HOW = {
    "whole": "`model.compile()` before the loop.",
    "blocks": "`for block in model.layers: block.compile()` before the loop.",
    "random": "`torch._inductor.config.fallback_random = True`, then `model.compile()`, before the loop.",
    "own random": "`torch._inductor.config.fallback_random = True` before it is compiled.",
}


def find_compile(steps: StepMeasurements, verdicts: Sequence[CompileVerdict]) -> list[Finding]:
    """Find whether the script should start or stop compiling."""
    owns = [verdict for verdict in verdicts if verdict.variant == "own"]
    own = max(owns, key=attrgetter("speed_up"), default=None)
    best = max((verdict for verdict in verdicts if verdict.pays), key=attrgetter("speed_up"), default=None)
    measured = "; ".join(map(format_verdict, verdicts))
    if own is None:
        if best is None:
            return []
        share, place, seen = 1 - 1 / best.speed_up, steps.call, f"the model runs eagerly: {measured}"
        return [
            Finding("compile", place, seen, f"{share:.0%} of each step", *_compile_with(best, steps), share)
        ]
    warm_up = format_duration(own.warm_up_s)
    if own.failure:
        costs = "compiled steps fail"
    elif own.costs:
        costs = f"a step takes {1 / own.speed_up:.2f} times as long as without, plus {warm_up} of warm-up"
    elif best is not None and best.speed_up >= own.speed_up * (1 + own.noise):
        costs = "another way to compile is faster"
    elif all(verdict.is_idle for verdict in owns) and len(owns) > 1:
        costs = f"{warm_up} of warm-up, for steps that are not faster"
    else:
        return []
    change = "Do not compile: remove this.", "1.00x, no warm-up"
    if best is not None and best is not own:
        change = _compile_with(best, steps)
    share, seen = 1 - own.speed_up if own.costs else None, f"the script compiles: {measured}"
    return [Finding("compile", steps.compiled_at, seen, costs, *change, share)]


def _compile_with(best: CompileVerdict, steps: StepMeasurements) -> tuple[str, str]:
    """Return the change to a way to compile, and the value after it."""
    change = _HOW[best.variant]
    if not steps.in_place:
        change = change.replace("model.compile(", "model = torch.compile(model, ").replace(", )", ")")
    memory = "" if best.memory_ratio is None else f", {best.memory_ratio:.2f}x the memory of a step"
    return change, f"{best.speed_up:.2f}x{memory}; pays after {best.break_even_steps} steps (measured)"


def format_verdict(verdict: CompileVerdict) -> str:
    """Format a verdict in a few words."""
    name = measurements.NAMES[verdict.variant]
    if verdict.failure:
        return f"{name}: {verdict.failure}"
    warm_up = format_duration(verdict.warm_up_s)
    return f"{name} {verdict.speed_up:.2f}x, noise {verdict.noise:.0%}, warm-up {warm_up}"


_MIN_ROWS = 16
_MIN_PADDING_GAIN = 0.10  # smallest gain for which to suggest another padding


class PaddingComparison(Struct, frozen=True):
    """The user's batches with their own padding, and with other paddings."""

    now: int  # positions that the model computes now, including padding
    useful: float
    num_shapes: int
    others: tuple[Padding, ...]


def compare_lengths(lengths: measurements.RowLengths | None) -> PaddingComparison | None:
    """Return a comparison of paddings on measured lengths, or None for batches without unequal rows."""
    if lengths is None or sum(map(len, lengths.rows)) < _MIN_ROWS:
        return None
    flat = [length for row in lengths.rows for length in row]
    shapes = [(len(rows), width) for rows, width in zip(lengths.rows, lengths.widths, strict=True)]
    now = sum(num_rows * width for num_rows, width in shapes)
    if sum(flat) == now:
        return None
    others = compare_paddings(
        flat,
        batch_size=max(num_rows for num_rows, _ in shapes),
        max_length=max(lengths.widths),
        # About an eighth of the longest row, from 8 to 64.
        multiple=min(64, max(8, 2 ** math.floor(math.log2(max(1, max(flat) / 8))))),
        pool=len(lengths.rows),
    )
    return PaddingComparison(now, sum(flat) / now, len(set(shapes)), tuple(others))


def find_padding(steps: StepMeasurements, paddings: PaddingComparison | None) -> list[Finding]:
    """Find padding that is a large share of the computation and avoidable."""
    if paddings is None:
        return []
    static = [one for one in paddings.others if one.name.startswith("buckets, multiple")]
    kept = [one for one in paddings.others if one.keeps_batches and one.name.startswith("longest, multiple")]
    best = min((*static, *kept), key=attrgetter("positions"))
    saved = 1 - best.positions / paddings.now
    if saved < _MIN_PADDING_GAIN:
        return []
    simple = min(kept, key=attrgetter("positions"))
    packed = next((one for one in paddings.others if one.name.startswith("packed")), None)
    change = f"{best.name[0].upper()}{best.name[1:]}: use `holdfast.train.lengths.BucketBatches`."
    if best is simple:
        change = f"Pad to the {best.name} (`padding='longest', pad_to_multiple_of=`)."
    elif 1 - simple.positions / paddings.now >= _MIN_PADDING_GAIN:
        share = simple.positions / paddings.now
        change += f" Padding to the {simple.name} alone: {share:.0%} of the current positions."
    if packed is not None and packed.positions < best.positions:
        change += f" Packing, for a causal model: {packed.positions / paddings.now:.0%}."
    place = None if steps.loader is None else steps.loader.sample_code or steps.loader.place
    padding, shapes = f"{1 - paddings.useful:.0%} of the model's", plural(paddings.num_shapes, "shape")
    seen, costs = f"{padding} positions are padding ({shapes})", f"{padding} work"
    after = f"{best.positions / paddings.now:.0%} of the positions, {plural(best.num_shapes, 'shape')}"
    return [Finding("padding", place or steps.call, seen, costs, change, after, saved)]


class TuningReport(Struct, frozen=True):
    """Result of a profile."""

    script: str
    steps: StepMeasurements
    throughput: Throughput
    findings: tuple[Finding, ...]  # the most expensive first
    verdicts: tuple[CompileVerdict, ...]
    paddings: PaddingComparison | None = None
    workers: tuple[TrialResult, ...] = ()
    unanswered: tuple[str, ...] = ()  # questions without an answer, and the reasons
    logs: str | None = None  # folder with the logs, if they were kept

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        values = to_plain(self)
        shown = ("device", "loader", "call")
        values["steps"] = {key: values["steps"][key] for key in shown}
        for verdict, row in zip(self.verdicts, values["verdicts"], strict=True):
            row["pays"] = verdict.pays
        return values
