"""Probable causes of differences between an uninterrupted run and a resumed run, with their fixes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from holdfast.cli.trials.traces import Divergence

_LOADER = (
    "Use DataLoader(data, batch_sampler=batches, generator=torch.Generator()) with batches = "
    "holdfast.train.data.GlobalBatches(len(data), batch_size), and add batches to the state; without a "
    "loader, derive the batch from the step."
)


def find_causes(
    keys: Collection[str], divergence: Divergence, doubts: Collection[str], restored: int
) -> list[str]:
    """Return the probable causes, the most likely first. Each is a sentence or two.

    Args:
        keys: names of the tensors and values that differ.
        divergence: first difference of the traces of the two runs.
        doubts: warnings about the state from its first save.
        restored: step from which the run was resumed.
    """
    if not keys:
        return list(doubts)
    return [*doubts, *_observed(divergence, restored, has_doubts=bool(doubts))]


def _observed(divergence: Divergence, restored: int, *, has_doubts: bool) -> Iterator[str]:
    if divergence.batch_step is not None:
        yield (
            f"The resumed run got another batch in step {divergence.batch_step}: the position in the data, "
            f"or its order, was not restored. {_LOADER}"
        )
    elif divergence.generator_step is not None:
        names = " and ".join(divergence.generators)
        yield (
            f"The generators of {names} differ after step {divergence.generator_step}: the resumed run drew "
            "more or fewer random numbers after its restore than the other run in the same steps. Objects "
            "that draw when they start, such as a loader, need their own generator. Do not seed after "
            "restore()."
        )
    elif not has_doubts:
        where = f" First seen in {', '.join(divergence.records)}." if divergence.records else ""
        yield (
            f"Batches and random numbers after step {restored} are the same, so something that controls "
            "training is not in the state, or was not restored: a schedule, a counter in a variable of the "
            "script, a tensor that no state_dict() has, or a load_state_dict() that ignores a part."
            f"{where} Add it to the state, and read it from there."
        )
