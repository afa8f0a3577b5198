"""Data whose samples are their indices."""

from __future__ import annotations

from torch.utils.data import Dataset


class Numbers(Dataset[int]):
    """Dataset whose samples are their indices."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index
