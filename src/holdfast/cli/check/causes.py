"""Probable causes of differences between an uninterrupted run and a resumed one, each with its fix; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from holdfast.cli.check.traces import Parting

_LOADER = (
    "Use torchdata.stateful_dataloader.StatefulDataLoader(..., generator=torch.Generator()) and add it to "
    "the state; without a loader, derive the batch from the step."
)


def find_causes(keys: Collection[str], parting: Parting, doubts: Collection[str], restored: int) -> list[str]:
    """Return sentences that explain why a resumed run differs, the likeliest first.

    Args:
        keys: names of the tensors and values that differ.
        parting: where the two runs part.
        doubts: of the state, found at its first save.
        restored: step from which the run was resumed.
    """
    if not keys:
        return list(doubts)
    return [*doubts, *_observed(parting, restored, has_doubts=bool(doubts))]


def _observed(parting: Parting, restored: int, *, has_doubts: bool) -> Iterator[str]:
    if parting.batch_step is not None:
        yield (
            f"The resumed run got another batch in step {parting.batch_step}: the position in the data, or "
            f"its order, did not come back. {_LOADER}"
        )
    elif parting.generator_step is not None:
        names = " and ".join(parting.generators)
        yield (
            f"The generators of {names} differ after step {parting.generator_step}: the resumed run drew "
            "more or fewer random numbers after its restore than the other in the same steps. What draws "
            "when it starts, such as a loader, needs a generator of its own; seed nothing after restore()."
        )
    elif not has_doubts:
        where = f" First seen in {', '.join(parting.records)}." if parting.records else ""
        yield (
            f"Batches and random numbers after step {restored} are the same, so something that steers "
            "training is not in the state, or did not come back: a schedule, a counter in a variable of the "
            "script, a tensor that no state_dict() has, or a load_state_dict() that ignores a part."
            f"{where} Add it to the state, and read it from there."
        )
