"""Small models for tests of sharding: a tied T5, a GPT with a tied head, a conv net; and their batches."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, BATCH = 67, 12, 8


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Layer(nn.Module):
    """One layer of the GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 51), nn.GELU(), nn.Linear(51, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """GPT with uneven sizes, a tied head, and a buffer that its state dict lacks."""

    def __init__(self, width: int = 21, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("place", torch.linspace(0, 1, LENGTH)[:, None], persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens and targets, both (batch, length) int64."""
        x = self.embed(tokens)
        x = x + self.place.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class ConvNet(nn.Module):
    """The FSDP tutorial's network, for 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 15, 3)
        self.norm = nn.GroupNorm(3, 15)
        self.fc1, self.fc2 = nn.Linear(240, 90), nn.Linear(90, 10)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of images (batch, 1, 8, 8) and targets (batch,) int64."""
        x = self.norm(self.conv2(self.conv1(images).relu())).relu()
        return functional.cross_entropy(self.fc2(self.fc1(x.flatten(1)).relu()).float(), targets)


def make(name: str) -> Any:
    """Return a model, always with the same weights."""
    torch.manual_seed(0)
    return {"gpt": Gpt, "conv": ConvNet, "t5": _t5}[name]()


def batch(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    if name == "conv":
        images = torch.randn(BATCH, 1, 8, 8, generator=generator)
        return images, torch.randint(0, 10, (BATCH,), generator=generator)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def loss_of(name: str, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return model(input_ids=inputs, labels=targets).loss.float() if name == "t5" else model(inputs, targets)


def _t5() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 21, "d_kv": 5, "d_ff": 33, "num_heads": 3}
    sizes["decoder_start_token_id"] = 0
    config = T5Config(**sizes, num_layers=2, use_cache=False, dropout_rate=0.0)
    return T5ForConditionalGeneration(config)
