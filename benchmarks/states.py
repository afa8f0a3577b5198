"""The training states that are saved: GPT-2 with AdamW in its exact shapes, and many small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as fn


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its optimizer; `vocabulary` is None if the model cannot be trained (no forward)."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    vocabulary: int | None
    device: torch.device

    def tensors(self) -> dict[str, Tensor]:
        """Every distinct tensor of the state by name; tied ones once."""
        found = {f"model.{name}": tensor for name, tensor in self.model.named_parameters()}
        found |= {f"model.{name}": tensor for name, tensor in self.model.named_buffers()}
        if self.optimizer is not None:
            names = {id(tensor): name for name, tensor in self.model.named_parameters()}
            for parameter, slots in self.optimizer.state.items():
                for slot, value in slots.items():
                    if isinstance(value, Tensor):
                        found[f"optimizer.{names[id(parameter)]}.{slot}"] = value
        return {name: tensor.detach() for name, tensor in found.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def digest(self) -> str:
        """Return one hash of all tensors, which is equal after an exact load."""
        hasher = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors().items()):
            hasher.update(name.encode())
            hasher.update(_raw(tensor))
        return hasher.hexdigest()

    def digests(self) -> dict[str, str]:
        """Return one hash for each tensor, by its name."""
        return {name: xxhash.xxh3_128_hexdigest(_raw(tensor)) for name, tensor in self.tensors().items()}

    def change(self) -> None:
        """Change every parameter and moment by an optimizer step; without an optimizer, the parameters."""
        if self.optimizer is not None:
            self.optimizer.step()
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.001)

    def scramble(self) -> None:
        """Overwrite every tensor, so that a load that does nothing is found out."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.fill_(-1)


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT-2."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024


class Projection(nn.Module):
    """GPT-2's affine map; its weight is (inputs, outputs), as in the published checkpoints."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Projection(shape.width, 3 * shape.width)
        self.c_proj = Projection(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        split = self.c_attn(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = fn.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))


class Mlp(nn.Module):
    """The two-layer perceptron of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Projection(shape.width, 4 * shape.width)
        self.c_proj = Projection(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        return self.c_proj(fn.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer block, normalised first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """GPT-2 with its tied head; 124,439,808 or 354,823,168 parameters in the two sizes used here."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) token ids to the scalar loss of predicting each next token."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return fn.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ManyTensors(nn.Module):
    """A model that is nothing but many small parameters."""

    def __init__(self, count: int, bytes_each: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(bytes_each // 4) for _ in range(count))


def build(name: str, device: str = "cpu") -> Subject:
    """The state of that name, filled with random numbers, after one optimizer step.

    Blocks: for some seconds per GB.
    """
    torch.manual_seed(0)
    return _BUILDERS[name](name, torch.device(device))


def _gpt2(shape: Shape) -> Callable[[str, torch.device], Subject]:
    def builder(name: str, device: torch.device) -> Subject:
        with device:
            model = Gpt2(shape)
            randomize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        _step_once(model, optimizer)
        return Subject(name, model, optimizer, shape.vocabulary, device)

    return builder


def _many(count: int, bytes_each: int) -> Callable[[str, torch.device], Subject]:
    def builder(name: str, device: torch.device) -> Subject:
        with device:
            model = ManyTensors(count, bytes_each)
            randomize(model)
        return Subject(name, model, None, None, device)

    return builder


def randomize(model: nn.Module) -> None:
    """Give every parameter values as at the start of a training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)


def _step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its moments by one step with synthetic gradients."""
    pattern = torch.randn(1 << 20, device=next(model.parameters()).device)
    for parameter in model.parameters():
        count = parameter.numel()
        repeated = pattern.repeat(math.ceil(count / pattern.numel()))[:count]
        parameter.grad = repeated.view_as(parameter).mul(1e-3)
    optimizer.step()


_BUILDERS: dict[str, Callable[[str, torch.device], Subject]] = {
    "gpt2-124m": _gpt2(Shape(layers=12, width=768, heads=12)),
    "gpt2-355m": _gpt2(Shape(layers=24, width=1024, heads=16)),
    "gpt2-xl": _gpt2(Shape(layers=48, width=1600, heads=25)),
    "small-8000": _many(8000, 8 << 10),
    "tiny": _gpt2(Shape(layers=2, width=128, heads=4, vocabulary=5003, positions=128)),
}
