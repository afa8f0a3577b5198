"""Position in the training data: recorded while batches are read, and reached again exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from holdfast.adapters.kit import generators
from holdfast.adapters.kit.generators import bytes_of, tensor_of
from holdfast.adapters.lightning.packages import CombinedLoader
from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.log import get_logger
from holdfast.train.data import Batches

_log = get_logger("lightning")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position of one rank in a pass over its training data.

    Attributes:
        num_batches: batches that training has used.
        at_start: generators when the pass began; None if it begins with the next batch.
        before_fetched: generators before the fetch of a batch that training has not used yet.
        loaders: states of the loaders, if each has one; before that fetch.
    """

    num_batches: int
    at_start: dict[str, Any] | None = None
    before_fetched: dict[str, Any] | None = None
    loaders: tuple[dict[str, Any], ...] = ()


class PositionedLoader(CombinedLoader):
    """CombinedLoader that records its position, and can begin at a recorded one.

    Loaders that have `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, restore their
    position themselves. So do batch samplers that count completed steps, such as GlobalBatches. The batches
    of others are read again, with the generators of that time, and discarded.
    """

    def __init__(self, loaders: Any, mode: Any) -> None:
        super().__init__(loaders, mode)
        self._at_start: dict[str, Any] | None = None
        self._before: tuple[dict[str, Any], tuple[dict[str, Any], ...]] | None = None  # the last fetch
        self._num_fetched = 0
        self._num_reached = 0  # batches that training has used
        self._begin_at: DataPosition | None = None
        self._fetched: list[Any] = []
        self.on_error: Callable[[Exception], object] = lambda _: None
        """Called with an error of the loaders, before it is raised."""

    @classmethod
    def around(cls, loader: Any) -> PositionedLoader:
        """Return a loader that records its position, combined like Lightning's own."""
        if isinstance(loader, PositionedLoader):
            return loader
        if isinstance(loader, CombinedLoader):
            return cls(loader.iterables, loader._mode)
        return cls(loader, "max_size_cycle")

    # -- batches that count steps ----------------------------------------------------------------------------

    @property
    def batches(self) -> list[Batches[Any]]:
        """Batch samplers that count completed steps, each once."""
        samplers = [getattr(loader, "batch_sampler", None) for loader in self.flattened]
        return list({id(one): one for one in samplers if isinstance(one, Batches)}.values())

    def reach(self, num_batches: int) -> None:
        """Record that training has used the first batches of this pass."""
        num_batches = max(self._num_reached, min(num_batches, self._num_fetched))
        for one in self.batches:
            num_before = self._num_reached // one.accumulation_steps
            one.complete_steps(num_batches // one.accumulation_steps - num_before)
        self._num_reached = num_batches

    def load_batches(self, states: list[dict[str, Any]]) -> None:
        """Continue at the positions of a checkpoint.

        Raises:
            InvalidInput: it has none, or those of other data.
        """
        if len(states) != len(self.batches):
            raise InvalidInput(
                f"The checkpoint has the positions of {len(states)} GlobalBatches, and the training data has "
                f"{len(self.batches)}. Nothing was trained. Resume with the loaders that the run "
                f"was saved with."
            )
        for one, state in zip(self.batches, states, strict=True):
            one.load_state_dict(state)

    def _check_loaders(self) -> None:
        if any(not isinstance(getattr(one, "batch_sampler", None), Batches) for one in self.flattened):
            raise Unsupported(
                "Some loaders of the training data have GlobalBatches, and others do not, so their positions "
                "cannot be restored together. Nothing was trained. Give each of them GlobalBatches, or none."
            )

    # -- record ----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return the states of the generators of the process and of the loaders."""
        return {**capture_generators(), "loaders": [one.get_state() for one in self._generators()]}

    def restore(self, states: dict[str, Any]) -> None:
        """Set the generators of the process and of the loaders."""
        set_generators(states)
        for generator, state in zip(self._generators(), states["loaders"], strict=False):
            generator.set_state(state.cpu())

    def position(self, num_batches: int) -> DataPosition:
        """Return the position after a number of batches of this pass."""
        if self._before is not None and self._num_fetched > num_batches:
            return DataPosition(num_batches, self._at_start, *self._before)
        return DataPosition(num_batches, self._at_start, None, self._loader_states())

    def _loader_states(self) -> tuple[dict[str, Any], ...]:
        """Return the states of the loaders; none unless each has one."""
        states = [] if self.batches else self._state_dicts()
        return tuple(states) if len(states) == len(self.flattened) else ()

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the loaders own, each once."""
        found: dict[int, torch.Generator] = {}
        for loader in self.flattened:
            samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
            inner = [getattr(one, "sampler", None) for one in samplers]
            for owner in (loader, *samplers, *inner):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
                    found[id(generator)] = generator
        return list(found.values())

    # -- reach -----------------------------------------------------------------------------------------------

    def begin_at(self, position: DataPosition) -> None:
        """Continue at a position with the next batch. The states of the generators do not change."""
        self._begin_at = position

    def __iter__(self) -> Self:
        if self._begin_at is not None and self._iterator is not None:
            return self  # the pass begins with the next batch, after all hooks that draw random numbers
        self._at_start, self._before = self.capture(), None
        self._num_fetched, self._num_reached, self._fetched = 0, 0, []
        if self.batches:
            self._check_loaders()
            for one in self.batches:
                one.complete_steps(0)
        super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._begin_at is not None:
            self._begin(self._begin_at)
        return self._fetched.pop() if self._fetched else self._fetch()

    def _fetch(self) -> Any:
        before = self._before
        if not self.has_length:
            self._before = self.capture(), self._loader_states()
        try:
            batch = super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            self._before = before  # of the batch that was fetched ahead
            self.on_error(error)
            raise
        self._num_fetched += 1
        return batch

    @property
    def has_length(self) -> bool:
        """True if the number of batches is fixed. Lightning does not fetch ahead then."""
        try:
            return len(self) != float("inf")
        except (TypeError, NotImplementedError):
            return False

    def _begin(self, position: DataPosition) -> None:
        """Begin a pass, and skip to the position."""
        self._begin_at = None
        if position.at_start is None:
            iter(self)
            self._pass_over(position)
            return
        now = self.capture()
        self.restore(position.at_start)
        if position.loaders:
            self._load_state_dicts(list(position.loaders))
        iter(self)
        self._at_start = position.at_start
        self._pass_over(position)
        if position.before_fetched is not None:
            self.restore(position.before_fetched)
            self._fetched = [self._fetch()]
        self.restore(now)

    def _pass_over(self, position: DataPosition) -> None:
        """Count the batches before a position as used, and reread those not skipped."""
        self._num_fetched = self._num_reached = position.num_batches
        if self.batches:  # they are at the last complete step; gradients of a part of one are not saved
            self._read_again(position.num_batches % self.batches[0].accumulation_steps)
        elif not position.loaders:
            self._read_again(position.num_batches)

    def _read_again(self, num_batches: int) -> None:
        if num_batches:
            _log.info(
                "reading %d batches again to reach the position in the data; torchdata's StatefulDataLoader "
                "is there at once",
                num_batches,
            )
        for _ in range(num_batches):
            super().__next__()


def capture_generators() -> dict[str, Any]:
    """Return the generators of this process, as values that torch.load accepts with `weights_only`."""
    states = generators.capture_generators()
    states["python"]["words"] = tensor_of(states["python"]["words"])
    if "numpy" in states:
        inner = dict(states["numpy"]["state"])
        inner["key"] = torch.from_numpy(inner["key"].astype("int64"))
        states["numpy"] = {**states["numpy"], "state": {**inner, "pos": int(inner["pos"])}}
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to states from `capture_generators`."""
    states = {**states, "python": {**states["python"], "words": bytes_of(states["python"]["words"])}}
    if "numpy" in states:
        inner = states["numpy"]["state"]
        inner = {**inner, "key": inner["key"].cpu().numpy().astype("uint32")}
        states["numpy"] = {**states["numpy"], "state": inner}
    generators.set_generators(states)
