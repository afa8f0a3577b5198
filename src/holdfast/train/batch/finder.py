"""Finds the batch: foretells memory, verifies it by real steps, times them, and changes nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any, final

import torch

from holdfast.errors import InvalidInput, RetryLater, Unsupported
from holdfast.quantity import plural, read_bytes, read_seconds, say_bytes
from holdfast.ranks import RankGroup, Ranks
from holdfast.train.batch.estimate import estimate_peak
from holdfast.train.batch.fit import BatchFit, Probe, choose_batch
from holdfast.train.batch.holdings import Holdings, count_bytes, find_holdings
from holdfast.train.batch.prober import STEPS_OF_A_PROBE, Prober
from holdfast.train.batch.rates import accumulate_to, say_rates, scale_rates
from holdfast.train.batch.room import find_limit
from holdfast.train.batch.sample import batch_size_of, resize
from holdfast.train.batch.search import Search
from holdfast.train.batch.snapshot import Snapshot

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_RANKS_TIMEOUT_S = 3600.0
_NO_LONGER_GAIN = 2  # sizes in a row that are no faster, after which no larger one is timed


def fit_batch(
    step: Callable[[Any], object],
    sample: Any,
    state: Any,
    *,
    make: Callable[[int], Any] | None = None,
    limit: int | str | None = None,
    least: int | None = None,
    most: int = 4096,
    longest_step: str | float | timedelta = "30s",
    rounds: int = 3,
    tuned_batch: int | None = None,
    global_batch: int | None = None,
    found: BatchFit | None = None,
    quiet: bool = False,
) -> BatchFit:
    """Find the largest batch that fits into memory, and the smallest that is as fast as any.

    Where the step can be followed without computing it, memory is foretold; what is foretold is verified by
    real steps. Nothing is different afterwards: modules, optimizers, gradients, generators and what else
    `state` holds are put back bit for bit. What the step changes besides is not known here: leave out writing
    logs or counting in files.

    The learning rate is not touched: what the known rules make of it is printed, with their sources.

    Args:
        step: one whole training step on a batch: forward, backward, the optimizer's step, gradients to zero.
        sample: a batch, on the device it is trained on. It is cut or repeated to other sizes.
        state: what the step changes: modules, optimizers, schedulers, tensors and generators, as for a
            Checkpointer.
        make: makes a batch of so many samples, where cutting and repeating `sample` would not do. The longest
            samples take most: make batches of those.
        limit: memory of one rank, in bytes or as "12GiB"; by default what is free on the device, less 3 %, or
            of this host or its control group, less 10 %, shared among the host's ranks.
        least: no smaller size is tried; by default 1, or 2 if the model normalizes over the batch.
        most: no larger size is tried.
        longest_step: no size whose step would take longer is tried.
        rounds: steps that are timed of each size.
        tuned_batch: samples of all ranks in an optimizer step for which the learning rate was chosen; by
            default those of `sample` on every rank.
        global_batch: samples of all ranks in an optimizer step that you want to keep: what accumulation it
            takes is printed.
        found: what an earlier search found, restored from a checkpoint. If it holds a size nothing is
            searched; otherwise it is filled.
        quiet: print nothing.

    Returns:
        `found`, or a new one: the same on every rank.

    Raises:
        InvalidInput: not even one sample fits, or an argument cannot be used.
        RetryLater: another rank's step failed.
        Unsupported: memory ran out in the midst of a step that other ranks are part of.

    Ranks: collective; every rank calls it alike. The rank with the least memory decides.
    Blocks: for some tens of real steps.
    """
    found = found if found is not None else BatchFit()
    if found:
        return found
    holdings = find_holdings(state)
    least = least or (2 if holdings.normalizes_batches else 1)
    _check(holdings, least, most, rounds)
    ranks = Ranks(timeout_s=_RANKS_TIMEOUT_S)
    sample_size = batch_size_of(sample) if make is None or tuned_batch is None else 0
    make = make or (lambda size: resize(sample, size))
    device = _device_of(holdings)
    held_bytes = count_bytes(holdings.all_tensors(), device)
    wanted = read_bytes(limit, "limit") if limit is not None else None
    limit_bytes = wanted or find_limit(device, held_bytes)
    longest_step_s = read_seconds(longest_step, "longest_step")
    with _untouched(state, holdings), _device_limit(device, wanted):
        prober = Prober(step, make, holdings, device, limit_bytes)
        finder = _Finder(ranks, prober, limit_bytes, found, least, most)
        foretold = finder.foretell(step, make, holdings)
        finder.search(foretold, longest_step_s)
        finder.time_steps(rounds, longest_step_s)
    ranks.part()
    if ranks.rank == 0 and not quiet:
        _tell(found, holdings, tuned_batch or sample_size * ranks.world_size, global_batch)
    return found


def _check(holdings: Holdings, least: int, most: int, rounds: int) -> None:
    unknown = [name for name in holdings.others if name not in {one.__name__ for one in _PLAIN}]
    if unknown or not holdings.modules or not 1 <= least <= most or rounds < 1:
        raise InvalidInput(
            f"A batch cannot be searched with {len(holdings.modules)} modules, objects of {unknown or 'no'} "
            f"types without state_dict, {least=}, {most=}, {rounds=}: `state` needs the model and the "
            "optimizer, everything in it a state_dict and a load_state_dict so that it can be put back, and "
            "the numbers must be at least 1 and in order."
        )


def _device_of(holdings: Holdings) -> torch.device:
    devices = {one for one in holdings.devices if one.type != "cpu"} or {torch.device("cpu")}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise Unsupported(
            f"The model lies on {', '.join(sorted(map(str, devices)))}. A batch can be searched for a model "
            "on one CUDA device for each rank, or on the CPU."
        )
    return devices.pop()


@contextlib.contextmanager
def _untouched(state: Any, holdings: Holdings) -> Iterator[None]:
    """What is in `state` is afterwards as it was."""
    holdings.reshard()
    snapshot = Snapshot(holdings)
    is_mapping = isinstance(state, MutableMapping)
    plain = {name: one for name, one in state.items() if isinstance(one, _PLAIN)} if is_mapping else {}
    try:
        yield
    finally:
        holdings.reshard()
        snapshot.put_back()
        if is_mapping:
            state.update(plain)


@contextlib.contextmanager
def _device_limit(device: torch.device, limit_bytes: int | None) -> Iterator[None]:
    """For the while, a limit that the user has set is the allocator's own, so that it runs out there."""
    if device.type != "cuda" or limit_bytes is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@final
class _Finder:
    """The parts of a search, each agreed by all ranks; fills `found`."""

    def __init__(
        self, ranks: RankGroup, prober: Prober, limit_bytes: int, found: BatchFit, least: int, most: int
    ) -> None:
        self._ranks, self._prober, self._found = ranks, prober, found
        self._least, self._most = least, most
        self._limit_bytes = limit_bytes
        found.limit_bytes = min(ranks.gather(limit_bytes))
        found.world_size = ranks.world_size
        self._probes: dict[int, Probe] = {}

    def foretell(
        self, step: Callable[[Any], object], make: Callable[[int], Any], holdings: Holdings
    ) -> Search | None:
        """Search on tensors without bytes; None if some rank cannot."""
        search = Search(start=self._least, least=self._least, most=self._most)
        while (size := search.next()) is not None:
            try:
                verdict: int | str = self._limit_bytes - estimate_peak(step, make, holdings, size)
            except Unsupported as error:
                verdict = str(error)
            verdicts = self._ranks.gather(verdict)
            if reasons := [one for one in verdicts if isinstance(one, str)]:
                self._found.note = f"memory measured by steps, not foretold: {reasons[0]}"
                return None
            search.tell(size, min(one for one in verdicts if isinstance(one, int)))
        self._found.note = "memory foretold by fake tensors, then verified by real steps"
        return search

    def search(self, foretold: Search | None, longest_step_s: float) -> None:
        """Look for the largest size by real steps, from where it is foretold to be."""
        least, most = self._least, self._most
        search = Search(start=least, least=least, most=most)
        if foretold is not None and foretold.largest > least:
            small = min(max(8, least), foretold.largest)
            step_s = self._slowest(small, 1)
            most = min(most, int(longest_step_s / step_s * small)) if step_s else most
            start, most = foretold.largest, max(least, most)
            search = Search(start=start, least=least, most=most, slope=foretold.slope)
        while (size := search.next()) is not None:
            room, took_s = self._try(size, search.expected_room(size))
            search.tell(size, room)
            if took_s > longest_step_s:
                break
        self._found.largest = search.largest
        if not search.largest:
            raise InvalidInput(
                f"Not even a batch of {least} fits into {say_bytes(self._found.limit_bytes)} on "
                f"every rank (its peak is {_say_peak(self._probes.get(least))}). Shard the model over more "
                "ranks, checkpoint activations, or cut sequences shorter."
            )

    def _try(self, size: int, expected_room: int | None) -> tuple[int | None, float]:
        """A real probe: bytes left free on the rank with the least, None if some lacked them; and seconds."""
        if expected_room is not None:
            has_room = self._agreed(lambda: self._prober.has_room(self._limit_bytes - expected_room))
            if not all(self._ranks.gather(has_room)):
                self._probes[size] = Probe(size, None, False)
                return None, 0.0
        begun_s = time.perf_counter()
        peak = self._agreed(lambda: self._prober.peak(size))
        took_s = (time.perf_counter() - begun_s) / STEPS_OF_A_PROBE
        told = self._ranks.gather((peak, self._limit_bytes, took_s))
        peaks = [one for one, _, _ in told if one is not None]
        room = (
            min(limit - one for one, limit, _ in told if one is not None) if len(peaks) == len(told) else None
        )
        self._probes[size] = Probe(size, None if room is None else max(peaks), room is not None and room >= 0)
        return room, max(seconds for _, _, seconds in told)

    def time_steps(self, rounds: int, longest_step_s: float) -> None:
        """Time sizes that fit, doubling them until they are no faster; take the smallest that is as fast."""
        sizes = [1 << power for power in range(self._found.largest.bit_length())]
        sizes = [size for size in sizes if self._least <= size < self._found.largest] + [self._found.largest]
        best, num_slower = 0.0, 0
        for size in sizes:
            step_s = self._slowest(size, rounds)
            if step_s is None:  # it fitted before, when less was fragmented
                self._found.largest = size - 1
                self._probes[size] = Probe(size, None, False)
                break
            before = self._probes.get(size)
            self._probes[size] = Probe(size, before.peak_bytes if before else None, True, step_s)
            gained = size / step_s > best * 1.03
            best, num_slower = max(best, size / step_s), 0 if gained else num_slower + 1
            if num_slower == _NO_LONGER_GAIN or step_s > longest_step_s:
                break
        self._found.probes = tuple(self._probes[size] for size in sorted(self._probes))
        self._found.size = choose_batch(self._found.probes)

    def _slowest(self, size: int, rounds: int) -> float | None:
        """Seconds of a step, on the slowest rank; None if some rank had not the memory."""
        times = self._ranks.gather(self._agreed(lambda: self._prober.step_seconds(size, rounds)))
        known = [one for one in times if one is not None]
        return max(known) if len(known) == len(times) else None

    def _agreed(self, measure: Callable[[], Any]) -> Any:
        """What was measured here. If a rank's step fails, every rank learns it instead of waiting for it."""
        failure: Exception | None = None
        value = None
        try:
            value = measure()
        except Exception as error:  # noqa: BLE001 - it is raised below, when the others know
            failure = error
        told = self._ranks.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text is not None:
                raise RetryLater(
                    f"The search for a batch ended because the step failed on rank {rank}: {text}", rank=rank
                )
        return value


def _say_peak(probe: Probe | None) -> str:
    return say_bytes(probe.peak_bytes) if probe and probe.peak_bytes is not None else "beyond what there is"


def _tell(found: BatchFit, holdings: Holdings, tuned_batch: int, global_batch: int | None) -> None:
    """Say on standard error what was found, and what it would mean for learning rate and accumulation."""
    lines = [str(found)]
    batch = found.size * found.world_size
    if global_batch is not None:
        plan = accumulate_to(global_batch, found.size, found.world_size)
        lines.append(
            f"to keep a global batch of {global_batch}: {plural(plan.num_parts, 'part')} of at most "
            f"{plan.largest_part} samples on each rank for one optimizer step; the learning rate stays"
        )
    elif batch != tuned_batch:
        for optimizer in holdings.optimizers:
            rates = {float(group["lr"]) for group in optimizer.param_groups}
            kind = type(optimizer).__name__
            for rate in sorted(one for one in rates if one > 0):
                said = say_rates(scale_rates(rate, tuned_batch, batch, optimizer=kind))
                lines.append(
                    f"if {kind}'s learning rate {rate:.3g} was chosen for a global batch of {tuned_batch}, "
                    f"then for {batch} try (it has not been changed):\n{said}"
                )
    sys.stderr.write("".join(f"holdfast: {line}\n" for text in lines for line in text.splitlines()))
    sys.stderr.flush()
