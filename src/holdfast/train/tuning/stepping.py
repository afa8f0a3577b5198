"""Plain steps: how long they take, how long the loop waits for data, and what the model is given."""

from __future__ import annotations

import time
from typing import Any

import torch
from typing_extensions import override

from holdfast.train.tuning import modules
from holdfast.train.tuning.clock import Clock
from holdfast.train.tuning.facts import Lengths, Place, Step, Steps
from holdfast.train.tuning.loaders import Loaders
from holdfast.train.tuning.modules import Call, Outermost
from holdfast.train.tuning.padding import useful_lengths
from holdfast.train.tuning.probe import Scene, Watcher

_WARM_UP = 2
_MAX_BATCHES = 256  # whose lengths are kept: enough to compare paddings


class Stepping(Watcher):
    """Times steps as they are.

    Args:
        num_steps: how many, after those that warm up.
        loaders: the loaders, watched.
        compiled_at: says where the script has called torch.compile, if it has.
    """

    def __init__(self, num_steps: int, loaders: Loaders, *, compiled_at: list[Place]) -> None:
        self._num_steps = num_steps + _WARM_UP
        self._loaders = loaders
        self._compiled_at = compiled_at
        self._steps: list[Step] = []
        self._shapes: list[str] = []
        self._rows: list[tuple[int, ...]] = []
        self._widths: list[int] = []
        self._given: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []
        self._items = self._elements = 0

    @property
    @override
    def num_steps(self) -> int:
        return self._num_steps

    @override
    def begin(self, scene: Scene) -> None:
        self._scene = scene
        self._clock = Clock(scene.device)
        self._loader = self._loaders.last()
        self._begin_step()

    @override
    def called(self, one: Outermost, call: Call) -> Call:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._note(args, kwargs)
            return call(*args, **kwargs)

        return calling

    @override
    def stepped(self, number: int) -> None:
        self._clock.settle()
        wall_s, cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._began_cpu_s
        is_odd = self._loaders.num_begun != self._begun or modules.compilations() != self._compiled
        if number > _WARM_UP:
            waited_s, num_loaded = self._loaders.waited()
            peak, num_items = self._clock.peak_bytes(), self._items or num_loaded
            self._steps.append(Step(wall_s, cpu_s, waited_s, num_items, self._elements, peak, is_odd))
        self._look_at_given()
        self._begin_step()

    @override
    def end(self) -> Steps:
        groups = self._scene.optimizer.param_groups
        rate = groups[0].get("initial_lr", groups[0].get("lr"))  # a schedule changes "lr"
        found = [modules.inner(one.module) for one in self._scene.modules]
        places = [one.place for one in self._scene.modules if one.place is not None]
        return Steps(
            device=self._scene.device.type,
            steps=tuple(self._steps),
            call=places[0] if places else None,
            optimizer=type(self._scene.optimizer).__name__,
            learning_rate=None if rate is None else float(rate),
            loader=self._loader,
            shapes=tuple(self._shapes),
            lengths=Lengths(tuple(self._rows), tuple(self._widths)) if self._rows else None,
            compiled_at=self._compiled_at[0] if self._compiled_at else None,
            has_random=any(modules.draws_random(module) for module in found),
            num_blocks=sum(len(modules.blocks(module)) for module in found),
            in_place=all(modules.compiles_in_place(module) for module in found),
        )

    def _begin_step(self) -> None:
        self._given.clear()
        self._items = self._elements = 0
        self._begun, self._compiled = self._loaders.num_begun, modules.compilations()
        self._clock.reset_peak()
        self._loaders.waited()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in modules.tensors((args, kwargs)) if one.dim() > 0]
        if not given:
            return
        largest = max(given, key=lambda one: one.numel())
        mask = kwargs.get("attention_mask")
        self._given.append((given, mask if isinstance(mask, torch.Tensor) else None))
        self._items += largest.shape[0]
        self._elements += largest.numel()

    def _look_at_given(self) -> None:
        """After the time was taken: to look at the contents makes a device's host wait."""
        sizes = [max((one.shape for one in given), key=torch.Size.numel) for given, _ in self._given]
        if sizes:
            self._shapes.append(str(tuple(max(sizes, key=torch.Size.numel))))
        for given, mask in self._given:
            if len(self._rows) < _MAX_BATCHES and (found := useful_lengths(given, mask)) is not None:
                self._rows.append(found[0])
                self._widths.append(found[1])
