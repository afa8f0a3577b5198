"""Fully sharded training on any number of ranks: kill it, start it again on more or fewer, or open it alone.

torchrun --standalone --nproc-per-node=4 examples/05_fsdp2.py [HOME [STEPS]]
torchrun --standalone --nproc-per-node=2 examples/05_fsdp2.py [HOME [STEPS]]
python examples/05_fsdp2.py --open [HOME]
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

VOCABULARY, WIDTH, LENGTH = 67, 48, 32


class Block(nn.Module):
    """One layer of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> the same."""
        normed = self.norms[0](x)
        x = x + self.attend(normed, normed, normed, need_weights=False)[0]
        return x + self.think(self.norms[1](x))


class Model(nn.Module):
    """Tokens in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) int64 -> mean cross-entropy of each next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(home: str, num_steps: int) -> None:
    """Train on this rank, together with the others."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank draws the whole model alike, and keeps its shard
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdfast.Checkpointer(home, {"model": model, "optimizer": optimizer}, every=10) as ckpt:
        for number, step in enumerate(ckpt.steps(num_steps)):  # from where the run stopped, on any ranks
            if step and number == 0:  # just restored: the digest that --open prints of that checkpoint
                total = digest(gathered(model, optimizer))
                if dist.get_rank() == 0:
                    print(f"step {step} on {dist.get_world_size()} ranks: {total}", flush=True)
            shift = torch.arange(LENGTH) + 7 * step + dist.get_rank()
            tokens = (shift * shift)[None, :] % VOCABULARY
            loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    holdfast.hard_exit()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor whole, under the name that it has in a checkpoint; collective."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.state.model.{name}.{key}"] = value
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """The sha256 of tensors' bytes, in the order of their names."""
    text = hashlib.sha256()
    for name in sorted(tensors):
        text.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def inspect(home: str) -> None:
    """Open the newest checkpoint in one process, without a model, and print a digest of it."""
    checkpoint = holdfast.open(home)
    found = checkpoint.tensors()
    total = digest({name: one for name, one in found.items() if name.startswith(("model.", "optimizer."))})
    print(f"step {checkpoint.step}, saved by {checkpoint.manifest.world_size} ranks: {total}")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--open"]
    place = arguments[0] if arguments else "runs/fsdp2"
    if "--open" in sys.argv:
        inspect(place)
    else:
        train(place, int(arguments[1]) if len(arguments) > 1 else 60)
