"""Live objects of a torchtitan trainer, as the state of a Checkpointer."""

# torchtitan has no type information where it is not installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER

from holdfast.adapters.kit.run import open_loaded


class Stateful(Protocol):
    """Object of the trainer with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Set the state."""
        ...


class Counters:
    """Counters of the trainer, such as its step, at the end of the last step.

    The trainer counts a step when it begins. A save at the end of a training whose data ran out comes after
    that, and must not have the number of a step that was not made.
    """

    def __init__(self, trainer: Stateful) -> None:
        self._trainer = trainer
        self._ended: dict[str, Any] | None = None

    def end_step(self) -> None:
        """Note the counters at the end of a step."""
        self._ended = dict(self._trainer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return self._trainer.state_dict() if self._ended is None else self._ended

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the counters."""
        self._trainer.load_state_dict(state_dict)


class DataPosition:
    """Position in the data. Each rank saves its own.

    Its keys name data-parallel ranks, so a rank whose number or layout has changed needs the position that
    another rank saved. A load waits for `set`, which finds it.
    """

    def __init__(self, dataloader: Stateful) -> None:
        self._dataloader = dataloader
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position."""
        return self._dataloader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved position until `set`."""
        self._saved = state_dict

    def set(self, home: str, step: int, attempt: int | None) -> None:
        """Set the position that was loaded, if any.

        Args:
            home: home of the checkpoint.
            step: step that was restored.
            attempt: attempt that saved it; None for the newest that has committed it.
        """
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._keep_generator()
        if not saved.keys() >= self._dataloader.state_dict().keys():
            opened = open_loaded(home, step, attempt)
            ranks = (opened.values(rank).get(DATALOADER, {}) for rank in range(opened.world_size))
            saved = {key: value for found in ranks for key, value in found.items()}
        self._dataloader.load_state_dict(saved)

    def _keep_generator(self) -> None:
        """Give the loader a copy of the restored generator, for the seed of its workers.

        A new iterator draws that seed, and the restored generator is past the draw of the uninterrupted
        training. torchtitan makes one iterator in each process.
        """
        loader: Any = self._dataloader
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()
            loader.generator.set_state(torch.get_rng_state())


def live_objects(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a Checkpointer for the states of a torchtitan manager.

    Model parts and the optimizers of a container become entries of their own: `model`, or `model_0` and
    so on if there are several.
    """
    found = {
        **_numbered(MODEL, states[MODEL].model),
        **_numbered(OPTIMIZER, getattr(states[OPTIMIZER], "optimizers", [states[OPTIMIZER]])),
    }
    for name, value in states.items():
        if name in (MODEL, OPTIMIZER) or value is None:
            continue
        if name == DATALOADER:
            found[name] = DataPosition(value)
        elif name == LR_SCHEDULER or isinstance(value, torch.Tensor) or not hasattr(value, "state_dict"):
            found[name] = value
        else:
            found[name] = Counters(value)
    return found


def _numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}_{number}": value for number, value in enumerate(values)}


def keys_of(names: Collection[str], live: Collection[str]) -> list[str]:
    """Return the keys of live objects that belong to some of torchtitan's states."""
    return [key for key in live if key in names or _without_number(key) in names]


def _without_number(key: str) -> str | None:
    name, _, number = key.rpartition("_")
    return name if number.isdigit() and name in (MODEL, OPTIMIZER) else None
