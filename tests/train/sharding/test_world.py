"""Which device is computed on, and what is refused because it would crash or train something else."""

from __future__ import annotations

import pytest

from holdfast import InvalidInput
from holdfast.train.sharding.world import choose_device

GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("asked", "accelerator", "backends", "chosen"),
    [
        (None, None, GLOO, "cpu"),
        (None, "cuda", NCCL, "cuda"),
        (None, "cuda", BOTH, "cuda"),
        ("cpu", "cuda", BOTH, "cpu"),
        ("cpu", "cuda", GLOO, "cpu"),
        ("cuda", "cuda", BOTH, "cuda"),
    ],
)
def test_the_accelerator_is_taken_if_the_group_can_carry_it(
    asked: str | None, accelerator: str | None, backends: dict[str, str], chosen: str
) -> None:
    assert choose_device(asked, accelerator, backends) == chosen


@pytest.mark.parametrize(
    ("asked", "accelerator", "backends", "said"),
    [
        (None, "cuda", GLOO, 'speaks gloo only.*device="cpu"'),
        ("cuda", "cuda", GLOO, "speaks gloo only"),
        ("cuda", None, GLOO, "this machine has no accelerator"),
        ("xpu", "cuda", BOTH, "this machine has cuda"),
        ("cpu", "cuda", NCCL, "carries no tensors of cpu .*cuda:nccl"),
    ],
)
def test_a_group_that_cannot_carry_the_device_is_refused(
    asked: str | None, accelerator: str | None, backends: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        choose_device(asked, accelerator, backends)
