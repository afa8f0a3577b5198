"""A small GPT with several sequences per row, each of which attends only to itself."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

NOTHING = -100
"""Label of a position without a prediction, which cross-entropy ignores."""


class Block(nn.Module):
    """One layer: attention among the tokens of a sequence, then a feed-forward network per token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.gather = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(rows, length, width) and (rows, 1, length, length) bool -> (rows, length, width)."""
        query, key, value = (
            self.attend(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.gather(found.transpose(1, 2).flatten(-2))
        return x + self.think(self.between(x))


class Gpt(nn.Module):
    """GPT that returns the loss of all next tokens, and their number.

    Args:
        vocabulary: number of tokens.
        length: maximum length of a row.
        width: size of a token's vector.
        heads: number of attention heads.
        layers: number of blocks.
    """

    def __init__(
        self, vocabulary: int, length: int, *, width: int = 96, heads: int = 4, layers: int = 3
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy of packed rows, and the number of tokens that are predicted.

        Args:
            row: `input_ids`, `position_ids` and `sequence_ids` (-1 for padding), each (rows, length).
        """
        x = self.token(row["input_ids"]) + self.place(row["position_ids"])
        ids = row["sequence_ids"]
        mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x[:, :-1]))
        is_predicted = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)  # no sequence's first token
        labels = row["input_ids"][:, 1:].where(is_predicted, NOTHING)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="sum"
        )
        return loss, (labels != NOTHING).sum()
