"""Packed rows have the same loss and gradients as their sequences one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.errors import InvalidInput
from holdfast.train.lengths import (
    PackedBatches,
    PackedRows,
    attention_mask,
    cumulative_lengths,
    join_sequences,
)


def test_a_row_small_enough_to_read() -> None:
    row = join_sequences([[5, 6, 7], torch.tensor([8, 9])], 7, pad_token_id=1)
    assert {name: one.tolist() for name, one in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 1, 1],
        "labels": [-100, 6, 7, -100, 9, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1],
        "sequence_ids": [0, 0, 0, 1, 1, -1, -1],
    }
    mask = attention_mask(row["sequence_ids"][None])[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert torch.equal(attention_mask(row["sequence_ids"][None], causal=False)[0, 0], mask | mask.T)
    starts, longest = cumulative_lengths(torch.stack([row["sequence_ids"]] * 2))
    assert starts.tolist() == [0, 3, 5, 7, 10, 12, 14]
    assert starts.dtype == torch.int32
    assert longest == 3


@pytest.mark.parametrize("sequences", [[[1, 2], [3, 4]], [[1], []]])
def test_sequences_that_do_not_fit_are_rejected(sequences: list[list[int]]) -> None:
    with pytest.raises(InvalidInput, match="do not fit in a row of 3"):
        join_sequences(sequences, 3)


class Tiny(nn.Module):
    """One layer of attention over tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Embedding(16, 16)
        self.into, self.head = nn.Linear(16, 48), nn.Linear(16, 20)

    def loss(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of all labels of a batch of rows."""
        x = self.embed(row["input_ids"]) + self.place(row["position_ids"])
        query, key, value = self.into(x)[:, None].chunk(3, dim=-1)
        x = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask(row["sequence_ids"])
        )
        logits = self.head(x[:, 0])[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, row["labels"][:, 1:].flatten(), reduction="sum")


def test_a_packed_batch_has_the_loss_and_gradients_of_its_sequences() -> None:
    torch.manual_seed(0)
    model = Tiny()
    sequences = [torch.randint(20, (length,)) for length in (5, 3, 7, 2, 6, 4, 1)]
    loader = DataLoader(
        PackedRows(sequences, 12),
        batch_sampler=PackedBatches([len(one) for one in sequences], 2, row_length=12),  # type: ignore[arg-type]
    )
    packed = torch.stack([model.loss(batch) for batch in loader]).sum()
    packed.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    rows = [join_sequences([sequence], len(sequence)) for sequence in sequences]
    losses = [model.loss({name: tensor[None] for name, tensor in row.items()}) for row in rows]
    alone = torch.stack(losses).sum()
    alone.backward()
    torch.testing.assert_close(packed, alone)
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
