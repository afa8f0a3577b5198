"""A small tensor subclass over two inner tensors, as libraries for quantization make them, for tests."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Rounding(enum.Enum):
    """A fact of the description that is of the program's own type."""

    NEAREST = 1
    DOWN = 2


@dataclasses.dataclass
class Grid:
    """Another one."""

    step: float = 0.5
    rounding: Rounding = Rounding.NEAREST


class Coded(torch.Tensor):
    """Codes of 8 bits with one scale per row. It looks like a float tensor."""

    codes: torch.Tensor
    scale: torch.Tensor
    grid: Grid

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, grid: Grid) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, grid: Grid) -> None:
        self.codes, self.scale, self.grid = codes, scale, grid

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"grid": self.grid}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], context["grid"])

    def whole(self) -> torch.Tensor:
        """The numbers that it stands for."""
        return self.codes.float() * self.scale[:, None] * self.grid.step

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        one = args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.view.default):
            parts = [one.codes, one.scale]
            if func in (aten.clone.default, aten._to_copy.default):
                parts = [part.clone() for part in parts]
            return cls(parts[0], parts[1], one.grid)
        if func is aten.copy_.default and isinstance(args[1], Coded):
            one.codes.copy_(args[1].codes)
            one.scale.copy_(args[1].scale)
            return one
        plain = tree_map(lambda x: x.whole() if isinstance(x, Coded) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def coded(rows: int = 4, seed: int = 0, grid: Grid | None = None) -> Coded:
    """Random codes and scales."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, 3), dtype=torch.int8, generator=draw)
    return Coded(codes, torch.rand(rows, generator=draw), grid or Grid())


def same_coded(a: Any, b: Any) -> bool:
    """Equal in every byte."""
    return (
        type(a) is type(b) is Coded
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.scale, b.scale)
        and a.grid == b.grid
    )


class Momentum(torch.optim.Optimizer):
    """Stochastic gradient descent whose momentum is `Coded`, made at the first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def _new_buffer(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        codes = torch.zeros(parameter.shape, dtype=torch.int8)
        return Coded(codes, torch.ones(len(parameter)), Grid(1.0 if signed else 0.5))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step as `torch.optim.SGD` with momentum does, with its momentum rounded to codes."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["momentum"] = self._new_buffer(parameter, signed=True)
                state["count"] += 1
                one = state["momentum"]
                new = 0.9 * one.whole() + parameter.grad
                one.scale.copy_(new.abs().amax(1).clamp(min=1e-9) / 127)
                one.codes.copy_((new / one.scale[:, None]).round().to(torch.int8))
                parameter.sub_(one.whole() * group["lr"])
