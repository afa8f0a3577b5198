"""How many ranks share one copy of the parameters, and what that is called; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import InvalidInput
from holdfast.quantity import plural


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of ranks, of which `shards` neighbours share each copy of the parameters.

    Args:
        num_ranks: of the process group.
        shards: ranks that together hold one copy; divides `num_ranks`.
    """

    num_ranks: int
    shards: int

    @property
    def copies(self) -> int:
        """How many copies of the parameters all ranks hold together."""
        return self.num_ranks // self.shards

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Of the device mesh: (copies, shards), or one dimension where there is one copy."""
        return (self.num_ranks,) if self.copies == 1 else (self.copies, self.shards)

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions."""
        return ("shard",) if self.copies == 1 else ("replicate", "shard")

    def in_words(self, *, keep: bool) -> str:
        """What this is, with the names that it has elsewhere.

        Args:
            keep: gathered parameters stay until the backward pass has used them.
        """
        if self.num_ranks == 1:
            return "on 1 rank, which holds all of it"
        if self.shards == 1:
            return f"replicated on {plural(self.num_ranks, 'rank')} (DDP)"
        stage = "ZeRO-2" if keep else "ZeRO-3"
        if self.copies == 1:
            return f"sharded over {plural(self.num_ranks, 'rank')} ({stage})"
        copies = f"{self.copies} copies, each sharded over {self.shards}"
        return f"on {plural(self.num_ranks, 'rank')}: {copies} (hybrid {stage})"


def lay_out(shards: int | Literal["all"], num_ranks: int) -> Layout:
    """The layout that is meant by `shards` on so many ranks.

    Raises:
        InvalidInput: not a number that divides the ranks evenly, nor "all".
    """
    if shards == "all":
        return Layout(num_ranks, num_ranks)
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise InvalidInput(f"shards must be a number of ranks or 'all', got {shards!r}.")
    if shards < 1 or num_ranks % shards:
        fitting = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InvalidInput(
            f"shards={shards} ranks cannot share a copy of the parameters evenly among "
            f"{plural(num_ranks, 'rank')}. "
            f"With this number of ranks shards may be {fitting}, or 'all'."
        )
    return Layout(num_ranks, shards)
