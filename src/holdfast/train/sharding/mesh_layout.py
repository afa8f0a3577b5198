"""Layout of a device mesh: ranks that share one copy of the parameters, and its common names; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import InvalidInput
from holdfast.system.units import plural


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Groups of `shards` neighbouring ranks that share one copy of the parameters.

    Args:
        num_ranks: ranks in the process group.
        shards: ranks that share one copy. Divides `num_ranks`.
    """

    num_ranks: int
    shards: int

    @property
    def copies(self) -> int:
        """Number of copies of the parameters over all ranks."""
        return self.num_ranks // self.shards

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shape of the device mesh: (copies, shards), or one dimension for a single copy."""
        return (self.num_ranks,) if self.copies == 1 else (self.copies, self.shards)

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions."""
        return ("shard",) if self.copies == 1 else ("replicate", "shard")

    def describe(self, *, reshard_after_forward: bool) -> str:
        """Return a description with the common names, such as ZeRO-3.

        Args:
            reshard_after_forward: gathered parameters are freed after the forward pass.
        """
        if self.num_ranks == 1:
            return "on 1 rank, not sharded"
        if self.shards == 1:
            return f"replicated on {plural(self.num_ranks, 'rank')} (DDP)"
        stage = "ZeRO-3" if reshard_after_forward else "ZeRO-2"
        if self.copies == 1:
            return f"sharded over {plural(self.num_ranks, 'rank')} ({stage})"
        copies = f"{self.copies} copies, each sharded over {self.shards}"
        return f"on {plural(self.num_ranks, 'rank')}: {copies} (hybrid {stage})"


def make_mesh_layout(shards: int | Literal["all"], num_ranks: int) -> MeshLayout:
    """Return the layout for `shards` on a number of ranks."""
    if shards == "all":
        return MeshLayout(num_ranks, num_ranks)
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise InvalidInput(f"shards must be a number of ranks or 'all', got {shards!r}.")
    if shards < 1 or num_ranks % shards:
        fitting = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InvalidInput(
            f"shards={shards} does not divide {plural(num_ranks, 'rank')} evenly. With this number of ranks, "
            f"shards may be {fitting}, or 'all'."
        )
    return MeshLayout(num_ranks, shards)
