"""Choice of the device to compute on; unsupported combinations are rejected."""

from __future__ import annotations

import pytest

from holdfast import InvalidInput
from holdfast.train.sharding.process_group import choose_device

GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("requested", "accelerator", "backends", "chosen"),
    [
        (None, None, GLOO, "cpu"),
        (None, "cuda", NCCL, "cuda"),
        (None, "cuda", BOTH, "cuda"),
        ("cpu", "cuda", BOTH, "cpu"),
        ("cpu", "cuda", GLOO, "cpu"),
        ("cuda", "cuda", BOTH, "cuda"),
    ],
)
def test_the_accelerator_is_chosen_if_the_group_supports_it(
    requested: str | None, accelerator: str | None, backends: dict[str, str], chosen: str
) -> None:
    assert choose_device(requested, accelerator, backends) == chosen


@pytest.mark.parametrize(
    ("requested", "accelerator", "backends", "message"),
    [
        (None, "cuda", GLOO, 'has only the gloo backend.*device="cpu"'),
        ("cuda", "cuda", GLOO, "has only the gloo backend"),
        ("cuda", None, GLOO, "this machine has no accelerator"),
        ("xpu", "cuda", BOTH, "this machine has cuda"),
        ("cpu", "cuda", NCCL, "does not support tensors on cpu .*cuda:nccl"),
    ],
)
def test_a_group_that_does_not_support_the_device_is_rejected(
    requested: str | None, accelerator: str | None, backends: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        choose_device(requested, accelerator, backends)
