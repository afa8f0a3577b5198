"""Captured: the live tensors and values of a state, by name; and the sink that collects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.format.layout import check_name
from holdfast.state.spread import Spread
from holdfast.state.tensors import is_same_view, is_savable, refuse

_REPLICATED, _LOWEST = Spread.REPLICATED, Spread.LOWEST


@dataclass(frozen=True, slots=True)
class Captured:
    """A state at one moment: its tensors still live, its values already encoded.

    `tensors` are detached and share memory with the training objects; of tensors that are one and the same
    only the first is among them. The order is the same on every rank whose state has the same structure.
    """

    tensors: dict[str, torch.Tensor]
    per_rank: frozenset[str]  # names of which every rank has its own
    lowest: frozenset[str]  # replicated names that the lowest rank writes, since its bytes are the true ones
    owned: frozenset[str]  # only a step of an optimizer in the state changes these
    tied: dict[str, str]  # alias -> name of the tensor that it is
    values: dict[str, Any]  # top-level key -> tagged JSON, with {"$tensor": name} for tensors


class Sink:
    """Collects tensors by name while a state is walked, and finds those that are one and the same.

    Args:
        world_size: number of ranks; with one rank, nothing is per rank.
        checked: names that are known not to be reserved; grows.
    """

    def __init__(self, world_size: int, checked: set[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.per_rank: set[str] = set()
        self.lowest: set[str] = set()
        self.owned: set[str] = set()
        self.parameter_names: dict[int, str] = {}  # id of a live parameter -> its first name
        self._checked = checked
        self._is_single = world_size == 1
        self._at: dict[int, str] = {}  # address -> first tensor that starts there
        self._more: dict[int, list[str]] = {}  # address -> other tensors that start there

    def add(self, name: str, tensor: torch.Tensor, spread: Spread) -> str:
        """Take a tensor; answers the name under which its bytes stand, another one if it is tied.

        Raises:
            Unsupported: a tensor that cannot be saved.
            InvalidInput: a name that is taken or reserved.
        """
        if not is_savable(tensor):
            raise refuse(tensor, name)
        if name not in self._checked:
            check_name(name)
            self._checked.add(name)
        if name in self.tensors or name in self.tied:
            raise _collision(name)
        address = tensor.data_ptr()
        if self._at.setdefault(address, name) is not name:
            if (other := self._twin(address, tensor)) is not None:
                self.tied[name] = other
                return other
            self._more.setdefault(address, []).append(name)
        is_bare = type(tensor) is torch.Tensor and not tensor.requires_grad
        self.tensors[name] = tensor if is_bare else tensor.detach()
        if not self._is_single and spread is not _REPLICATED:
            (self.lowest if spread is _LOWEST else self.per_rank).add(name)
        return name

    def _twin(self, address: int, tensor: torch.Tensor) -> str | None:
        """Name of a taken tensor that is the same as this one; an empty tensor has no address and no twin."""
        names = [self._at[address], *self._more.get(address, ())] if address else []
        return next((name for name in names if is_same_view(self.tensors[name], tensor)), None)

    def emitter(self, spread: Spread, *, is_owned: bool = False) -> Callable[[str, torch.Tensor], None]:
        """A function that takes tensors with one spread, for `tree.strip`."""

        def emit(name: str, tensor: torch.Tensor) -> None:
            self.add(name, tensor, spread)
            if is_owned:
                self.own(name)

        return emit

    def own(self, name: str) -> None:
        """Mark a name as changed only by a step of an optimizer in the state."""
        self.owned.add(self.tied.get(name, name))

    def is_per_rank(self, name: str) -> bool:
        """True if every rank has its own of this name."""
        return self.tied.get(name, name) in self.per_rank

    def captured(self, values: dict[str, Any]) -> Captured:
        """All that was taken, with the encoded values."""
        return Captured(
            tensors=self.tensors,
            per_rank=frozenset(self.per_rank),
            lowest=frozenset(self.lowest),
            owned=frozenset(self.owned),
            tied=self.tied,
            values=values,
        )


def _collision(name: str) -> InvalidInput:
    message = (
        f"Two tensors of the state would both be saved as {name!r}: a key with a dot in it, or a number and "
        "a string that read the same, make names ambiguous. Nothing was written. Rename one of the keys."
    )
    return InvalidInput(message, key=name)
