"""Position of a data loader in its data, so that a resumed run continues there."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import PartialState

from holdfast.adapters.kit import generators
from holdfast.adapters.kit.generators import bytes_of, tensor_of
from holdfast.errors import ResumeWarning
from holdfast.system.callsite import warn

_TENSORS = frozenset({"torch", "cuda"})
"""Generators of a process whose states are tensors, which are saved as bytes."""
BETWEEN, WITHIN, AT_END = "between", "within", "at end"
"""Phases: no pass is under way; one is; or one is, and its last batch has been given."""


class DataPosition:
    """Position of one loader. Each rank saves its own.

    The number of used batches is not part of it: the script has it, or a StatefulDataLoader.

    A stateful loader makes the iterator of its first pass when it is prepared, and draws from its generators
    then. So that pass began before the loader was prepared.

    Args:
        loader: loader of the Accelerator.
        before: generators before it was prepared; None if they are not known.
    """

    def __init__(self, loader: Any, before: UnpreparedGenerators | None = None) -> None:
        self._loader = loader
        self._active: Any = None  # loader of the pass that is under way
        if is_stateful(loader) and before is None:
            loader.load_state_dict({})  # the first pass gets another iterator
        self._has_first = is_stateful(loader) and before is not None  # the iterator that was made first
        # Of the pass that is under way, or of the last one.
        self._at_start = before.states(loader) if before is not None else capture_generators(loader)
        self._pending: dict[str, Any] | None = None  # position from a checkpoint, until a pass begins
        self._is_continued = False  # the pass that is under way began before the checkpoint
        self._has_begun = False  # there has been a pass

    # -- the state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        if self._pending is not None:  # nothing has been read since it was loaded
            return self._pending
        active = self._loader if self._active is None else self._active
        return {
            "epoch": active.iteration,
            "phase": self._phase(),
            "has_begun": self._has_begun,
            "at_start": self._at_start,
            "generators": _states_of(own_generators(self._loader)),
            "loader": self._loader.state_dict() if is_stateful(self._loader) else None,
            "num_ranks": PartialState().num_processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position. A pass that is under way is not changed."""
        loader, self._active, self._has_begun = self._loader, None, state["has_begun"]
        self._has_first = self._has_first and not self._has_begun
        if self._has_first:
            self._at_start = state["at_start"]
        loader.set_epoch(state["epoch"])
        num_ranks = PartialState().num_processes
        if state["num_ranks"] != num_ranks:
            self._pending = None
            self._load_elsewhere(state)
            return
        _set_states(own_generators(loader), state["generators"])
        if is_stateful(loader) and state["loader"] is not None:
            if state["phase"] == WITHIN:
                loader.load_state_dict(state["loader"])
            elif state["has_begun"]:
                loader.load_state_dict({})  # else it begins with the iterator that it was made with
        self._pending = state

    def _load_elsewhere(self, state: dict[str, Any]) -> None:
        """Load a position of another number of ranks, once the epoch is set."""
        if state["phase"] != BETWEEN:
            warn(
                f"The position in the data is of {state['num_ranks']} ranks, and this run has "
                f"{PartialState().num_processes}. The epoch is set, and the batches of the rest of it differ "
                "from those of an unbroken run. GlobalBatches in the loader resume on any number.",
                ResumeWarning,
            )

    @property
    def _continues_itself(self) -> bool:
        """True if the next pass of the loader is the rest of the saved pass."""
        return is_stateful(self._loader)

    def _phase(self) -> str:
        if self._active is None:
            return BETWEEN
        return AT_END if self._active.end_of_dataloader else WITHIN

    # -- a pass ----------------------------------------------------------------------------------------------

    def begin(self, loader: Any) -> dict[str, Any] | None:
        """Begin a pass of a loader.

        Returns:
            States of the generators for `set_back`, if it continues the pass of a checkpoint.
        """
        pending, self._pending = self._pending, None
        self._has_begun = True
        self._active, now = loader, capture_generators(self._loader)
        if not self._has_first:
            self._at_start = now
        self._has_first = self._is_continued = False
        if pending is None or pending["phase"] == BETWEEN:
            return None
        continues = loader.holdfast_continues or (self._continues_itself and pending["phase"] == WITHIN)
        if not continues:
            if pending["phase"] == AT_END and loader.iteration == pending["epoch"]:
                loader.iteration += 1  # that pass is over
            return None
        self._at_start, self._is_continued = pending["at_start"], True
        set_generators(self._at_start, self._loader)
        return now

    def give(self, number: int) -> bool:
        """Record a batch that training gets. Return False if it is to be left out.

        Args:
            number: its number in the pass, from 1.
        """
        return True

    def set_back(self, now: dict[str, Any] | None) -> None:
        """Set the generators back to their states before a continued pass began."""
        if now is not None:
            set_generators(now, self._loader)

    def leave(self) -> None:
        """Leave a pass before its end."""
        self._active = None

    def end(self, loader: Any, *, is_empty: bool) -> None:
        """End a pass.

        Args:
            loader: its loader.
            is_empty: it did not have a batch.
        """
        self._active = None
        if is_empty and self._is_continued:
            self._loader.iteration = loader.iteration + 1  # Accelerate does not count a pass without a batch
        elif not is_empty:
            self._loader.iteration = loader.iteration


class UnpreparedGenerators:
    """States of generators before Accelerate prepares a data loader, and draws from them."""

    def __init__(self, loader: Any) -> None:
        samplers = [getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)]
        found = [getattr(one, "generator", None) for one in (loader, *samplers)]
        self._own = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
        self._process = _capture_process()

    def states(self, loader: Any) -> dict[str, Any]:
        """Return the states that the generators of the prepared loader had, as `capture_generators`."""
        own = {name: self._state_of(one) for name, one in own_generators(loader).items()}
        return {**self._process, "own": own}

    def _state_of(self, generator: torch.Generator) -> bytes:
        """Return the state of a generator; Accelerate has seeded those that did not exist before."""
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
        state = next((state for one, state in self._own if one is generator), fresh)
        return bytes_of(state)


def is_stateful(loader: Any) -> bool:
    """Return True if a loader has a position of its own, as torchdata's StatefulDataLoader."""
    return bool(loader.use_stateful_dataloader)


def own_generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that a loader draws from besides those of the process, by owner."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    owners = {
        "ranks": getattr(loader, "synchronized_generator", None),
        "sampler": getattr(sampler, "generator", None),
        "loader": getattr(loader.base_dataloader, "generator", None),
    }
    return {
        name: one
        for name, one in owners.items()
        if isinstance(one, torch.Generator) and one is not torch.default_generator
    }


def capture_generators(loader: Any) -> dict[str, Any]:
    """Return the states of the generators of the process and of a loader."""
    return {**_capture_process(), "own": _states_of(own_generators(loader))}


def _capture_process() -> dict[str, Any]:
    states = generators.capture_generators()
    return {**states, **{name: bytes_of(states[name]) for name in _TENSORS & states.keys()}}


def set_generators(states: dict[str, Any], loader: Any) -> None:
    """Set the generators of the process and of a loader to states from `capture_generators`."""
    generators.set_generators(
        {**states, **{name: tensor_of(states[name]) for name in _TENSORS & states.keys()}}
    )
    _set_states(own_generators(loader), states["own"])


def _states_of(owned: dict[str, torch.Generator]) -> dict[str, bytes]:
    return {name: one.get_state().cpu().numpy().tobytes() for name, one in owned.items()}


def _set_states(owned: dict[str, torch.Generator], states: dict[str, bytes]) -> None:
    for name, generator in owned.items():
        if name in states:
            generator.set_state(tensor_of(states[name]))
