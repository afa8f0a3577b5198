"""From what was seen to what is worth saying: each finding with line, cost and change; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from holdfast.quantity import plural, say_seconds
from holdfast.train.tuning.facts import Graphs, Place, Recompile, Steps, Sync, Syncs
from holdfast.train.tuning.verdict import Pace, Verdict

WAITING = 0.10
"""Share of a step from which on waiting for data is worth a word."""
_OFTEN = 0.25  # of the steps: what happens less often is logging as it should be
_FELT = 0.01  # of a step: what a line must take to be worth a number
_MANY = 3  # recompiles: fewer are how the compiler learns which sizes change


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change."""

    kind: str
    place: Place | None
    seen: str
    costs: str
    change: str
    after: str
    """The number after the change: measured, or what it is at best."""
    share: float | None = None
    """Part of a step's time that it costs, where that was measured."""


# -- host syncs and graph breaks -----------------------------------------------------------------------------

_READ = "Keep the tensor (`.detach()`), and read it every so many steps"
_CHANGES = {
    ".item()": f"{_READ}: `if step % 50 == 0: ... .item()`.",
    "float()": f"{_READ}; sums can be kept on the device: `total += loss.detach()`.",
    "int()": f"{_READ}.",
    "print()": f"{_READ}: `if step % 50 == 0: print(...)`.",
    ".tolist()": f"{_READ}; gather results on the device and move them once.",
    ".numpy()": f"{_READ}; gather results on the device and move them once.",
    ".cpu()": f"{_READ}; gather results on the device and move them once.",
    ".to('cpu')": f"{_READ}; gather results on the device and move them once.",
    "bool()": "Choose on the device: `torch.where(condition, a, b)` instead of `if`.",
    "in": "Compare on the device: `(x == value).any()` goes into `torch.where`.",
    "x[mask]": "Keep the shape: `torch.where(mask, x, 0)` or `x * mask`, and divide by `mask.sum()`.",
    ".masked_select()": "Keep the shape: `torch.where(mask, x, 0)` or `x * mask`.",
    ".nonzero()": "Keep the mask and compute with it, or give the count: `torch.nonzero_static`.",
    ".repeat_interleave()": "Give `output_size=`, then nothing has to be counted.",
}
_OTHERWISE = "Do it every so many steps, or not in the step."


def find_syncs(syncs: Syncs, step_s: float) -> list[Finding]:
    """Lines that make the host wait in every step, or nearly; what happens now and then is no finding."""
    return [
        _sync_finding(sync, syncs, step_s)
        for sync in syncs.found
        if sync.num_steps >= max(2, _OFTEN * syncs.num_steps)
    ]


def _sync_finding(sync: Sync, syncs: Syncs, step_s: float) -> Finding:
    each_s = sync.seconds / max(1, syncs.num_steps)
    times = sync.num_times / max(1, syncs.num_steps)
    is_each = sync.num_steps >= syncs.num_steps - 1  # what comes after the last step is not watched any more
    often = "every step" if is_each else f"{sync.num_steps} of {plural(syncs.num_steps, 'step')}"
    library = f", by {sync.inside.file}:{sync.inside.line}" if sync.inside else ""
    many = f", {times:.0f} times" if times > 1.5 else ""
    where = " in the model" if sync.in_forward else ""
    if syncs.device == "cpu":
        cost = f"{say_seconds(each_s)} a step" if each_s > _FELT * step_s else "nothing"
        costs = f"{cost} on this CPU; on a GPU the host waits until all it has asked for is done"
    else:
        costs = f"the host waits {say_seconds(each_s)} a step"
    return Finding(
        kind="sync",
        place=sync.place,
        seen=f"{sync.kind}{where} in {often}{many}{library}",
        costs=costs,
        change=_CHANGES.get(sync.kind, _OTHERWISE),
        after=f"at best {say_seconds(max(0.0, step_s - each_s))} a step"
        if each_s > _FELT * step_s
        else "no wait",
        share=each_s / step_s if step_s else None,
    )


def find_breaks(graphs: Graphs, syncs: Sequence[Finding]) -> list[Finding]:
    """Lines at which the model's graph is cut; what the sync watch saw at the same line is told with it."""
    by_place = {_line(one.place): one for one in syncs}
    found = []
    for one in graphs.breaks:
        sync = by_place.get(_line(one.place))
        also = f"; {sync.seen}" if sync else ""
        change = sync.change if sync else "Move it out of the model's forward, or keep it for debugging."
        found.append(
            Finding(
                kind="graph break",
                place=one.place,
                seen=f"the compiler cuts the graph here: {one.reason}{also}",
                costs=f"what is compiled is {plural(graphs.num_graphs, 'graph')}; nothing is "
                "fused across a cut",
                change=change,
                after="no cut",
                share=sync.share if sync else None,
            )
        )
    return found


def without(findings: Iterable[Finding], others: Iterable[Finding]) -> list[Finding]:
    """Findings whose line none of the others has."""
    taken = {_line(one.place) for one in others}
    return [one for one in findings if _line(one.place) not in taken]


def _line(place: Place | None) -> tuple[str, int] | None:
    return None if place is None else (place.file, place.line)


# -- recompiles ----------------------------------------------------------------------------------------------


def find_recompiles(graphs: Graphs, num_shapes: int) -> list[Finding]:
    """Functions that are compiled again and again."""
    return [
        _recompile_finding(one, graphs, num_shapes)
        for one in graphs.recompiles
        if one.num_times >= _MANY or one.hit_limit
    ]


def _recompile_finding(one: Recompile, graphs: Graphs, num_shapes: int) -> Finding:
    why = one.reasons[0] if one.reasons else "unknown"
    if one.is_shape:
        seen = f"`{one.function}` is compiled anew for shapes ({num_shapes} distinct ones): {why}"
        change = (
            "Pad to a multiple or in buckets, so that few shapes occur; or have the compiler keep one graph "
            "for all of them: `dynamic=None` or `True`, `torch._dynamo.mark_dynamic`."
        )
    else:
        seen = (
            f"`{one.function}` is compiled anew because a value that it was compiled for has changed: {why}"
        )
        change = "Keep what changes in every step out of the model, or make it a tensor (a buffer)."
    given_up = "; then the compiler gave it up, and it runs eagerly" if one.hit_limit else ""
    return Finding(
        kind="recompile",
        place=one.place,
        seen=seen,
        costs=f"compiled {one.num_times} times more in {plural(graphs.num_steps, 'step')}{given_up}",
        change=change,
        after="compiled once",
    )


# -- input ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """The training with one setting changed, really run."""

    value: int
    """Of the setting."""
    step_s: float
    items_per_s: float
    """Samples per second; of CPU time where the batch is tried on a CPU."""
    wait_share: float
    noise: float
    peak_bytes: int | None
    failure: str = ""


def find_input(steps: Steps, now: Pace, trials: Sequence[Trial]) -> list[Finding]:
    """The loader, if the steps wait for it."""
    loader = steps.loader
    if loader is None or now.wait_share < WAITING:
        return []
    waited_s = now.wait_share * now.step_s
    seen = (
        f"{now.wait_share:.0%} of a step is spent waiting for the data loader "
        f"(num_workers={loader.num_workers})"
    )
    costs = f"{say_seconds(waited_s)} of {say_seconds(now.step_s)} a step"
    tried = ", ".join(f"{one.value}: {say_seconds(one.step_s)}" for one in trials if not one.failure)
    best = min((one for one in trials if not one.failure), key=lambda one: one.step_s, default=None)
    if best is not None and best.step_s < now.step_s * (1 - max(now.noise, best.noise)):
        change = f"`num_workers={best.value}` (measured a step with {tried})."
        after = f"{say_seconds(best.step_s)} a step, {best.wait_share:.0%} waiting (measured)"
        return [Finding("input", loader.place, seen, costs, change, after, 1 - best.step_s / now.step_s)]
    if loader.is_iterable:
        more = "its dataset is a stream, which each worker would read as a whole unless it divides it"
    else:
        more = (
            f"more workers are no quicker here ({tried})"
            if tried
            else "other numbers of workers were not tried"
        )
    change = f"Do less for each sample: prepare the data once, before training ({more})."
    after = f"at best {say_seconds(now.step_s - waited_s)} a step"
    return [Finding("input", loader.making or loader.place, seen, costs, change, after, now.wait_share)]


# -- compile -------------------------------------------------------------------------------------------------

NAMES = {
    "whole": "the whole model",
    "blocks": "each block",
    "random": "the whole model with eager's random numbers",
    "own": "as the script does",
    "own random": "as the script does, with eager's random numbers",
}
_HOW = {
    "whole": "`model.compile()` before the loop.",
    "blocks": "`for block in model.layers: block.compile()` before the loop.",
    "random": "`torch._inductor.config.fallback_random = True`, then `model.compile()`, before the loop.",
    "own random": "`torch._inductor.config.fallback_random = True` before it is compiled.",
}


def find_compile(steps: Steps, verdicts: Sequence[Verdict]) -> list[Finding]:
    """Compiling, where it should be begun or left."""
    owns = [one for one in verdicts if one.variant == "own"]
    own = max(owns, key=lambda one: one.speed_up, default=None)
    best = max((one for one in verdicts if one.pays), key=lambda one: one.speed_up, default=None)
    said = "; ".join(say_verdict(one) for one in verdicts)
    if own is None:
        if best is None:
            return []
        gained = 1 - 1 / best.speed_up
        costs = f"{gained:.0%} of each step"
        change = _how(steps, best)
        return [
            Finding(
                "compile", steps.call, f"the model runs eagerly: {said}", costs, change, _after(best), gained
            )
        ]
    is_idle = all(one.is_idle for one in owns) and len(owns) > 1
    is_beaten = best is not None and best.speed_up >= own.speed_up * (1 + own.noise)
    if not (own.costs or own.failure or is_beaten or is_idle):
        return []
    warm_up = say_seconds(own.warm_up_s)
    if own.failure:
        costs = "it does not come to an end"
    elif own.costs:
        costs = f"a step takes {1 / own.speed_up:.2f} times as long as without, and {warm_up} to begin"
    elif is_beaten:
        costs = "another way to compile is quicker"
    else:
        costs = f"{warm_up} to begin, for steps that are no quicker"
    change = _how(steps, best) if best is not None and best is not own else "Do not compile: remove this."
    after = _after(best) if best is not None and best is not own else "1.00x, no warm-up"
    share = 1 - own.speed_up if own.costs else None
    return [
        Finding("compile", steps.compiled_at, f"the script compiles: {said}", costs, change, after, share)
    ]


def _how(steps: Steps, best: Verdict) -> str:
    how = _HOW[best.variant]
    return (
        how
        if steps.in_place
        else how.replace("model.compile(", "model = torch.compile(model, ").replace(", )", ")")
    )


def _after(verdict: Verdict) -> str:
    memory = "" if verdict.memory_ratio is None else f", {verdict.memory_ratio:.2f}x the memory of a step"
    return f"{verdict.speed_up:.2f}x{memory}; pays after {verdict.break_even_steps} steps (measured)"


def say_verdict(verdict: Verdict) -> str:
    """A verdict in a few words."""
    name = NAMES[verdict.variant]
    if verdict.failure:
        return f"{name}: {verdict.failure}"
    return (
        f"{name} {verdict.speed_up:.2f}x, noise {verdict.noise:.0%}, warm-up {say_seconds(verdict.warm_up_s)}"
    )
