"""The plan of a save: which tensors this rank writes, and where in the file; kept by structure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.format.dtypes import TORCH_NAMES
from holdfast.format.layout import FileLayout, Piece, lay_out
from holdfast.format.part import pieces_text
from holdfast.stage.arena import Arena

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank writes, as long as the structure of the state stays the same."""

    names: tuple[str, ...]  # of the tensors this rank writes, in the order of `pieces`
    eager: tuple[int, ...]  # indices of tensors to copy before save() returns
    background: tuple[int, ...]  # indices of tensors that an optimizer owns
    pieces: tuple[Piece, ...]
    layout: FileLayout
    pieces_text: bytes
    number: int = field(default_factory=lambda: next(_numbers))

    @classmethod
    def make(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        writers: Mapping[str, int],
        per_rank: frozenset[str],
        owned: frozenset[str],
        rank: int,
    ) -> Plan:
        """Plan for `rank`, given the writing rank of each replicated tensor."""
        names = [name for name in tensors if name in per_rank or writers[name] == rank]
        pieces = [
            Piece.whole(
                name, _NAMES[tensors[name].dtype], tuple(tensors[name].shape), per_rank=name in per_rank
            )
            for name in names
        ]
        layout = lay_out(pieces, rank)
        return cls(
            names=tuple(names),
            eager=tuple(i for i, name in enumerate(names) if name not in owned),
            background=tuple(i for i, name in enumerate(names) if name in owned),
            pieces=tuple(pieces),
            layout=layout,
            pieces_text=pieces_text(pieces, layout.starts),
        )

    def views(self, arena: Arena) -> list[torch.Tensor]:
        """This plan's tensors inside `arena`, contiguous, in the order of `pieces`; made once per arena."""
        if self.number not in arena.views:
            arena.views.clear()  # only one plan lives at a time
            header = torch.frombuffer(bytearray(self.layout.header), dtype=torch.uint8)
            arena.bytes[: len(header)].copy_(header)
            arena.views[self.number] = [
                arena.bytes[start : start + piece.num_bytes].view(_DTYPES[piece.dtype]).view(piece.lengths)
                for piece, start in zip(self.pieces, self.layout.starts, strict=True)
            ]
        return arena.views[self.number]


_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items() if hasattr(torch, attribute)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
