"""What `describe` says: the units as a tree, how they are sharded, bytes of this rank; of any model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast
from elastic.conftest import Worlds
from train.sharding.models import make
from train.sharding.starts import by_hand, of_others, said_of

pytestmark = pytest.mark.ranks

GPT = """\
Gpt sharded over 2 ranks (ZeRO-3), on cpu over gloo
  13,887 parameters, 55.5 kB; this rank keeps 28.6 kB (51.4%) and gathers up to 19.5 kB beside it
  computes in bfloat16, averages gradients in float32
  offloaded to host memory, recomputed in backward
  Gpt                                 unit: 1,449 parameters, 2.9 kB of 5.8 kB here, kept after forward
  ├─ embed: Embedding                 1,407, tied to head.weight
  ├─ layers: ModuleList
  │  └─ 0-2, 3 times: Layer           unit: 4,146 parameters, 8.5 kB of 16.6 kB here, freed after forward
  ├─ norm: LayerNorm                  42
  └─ head: Linear                     0, tied to embed.weight
  note: the parameters are in host memory as it is: offload changes nothing here
  note: 1 buffers keep their dtype (place): convert them where they meet activations"""

CONV = """\
ConvNet replicated on 2 ranks (DDP), on cpu over gloo
  23,805 parameters, 95.2 kB; this rank keeps 95.2 kB (100.0%) and gathers up to 95.2 kB beside it
  ConvNet                             unit: 1,020 parameters, 4.1 kB of 4.1 kB here, kept after forward
  ├─ conv1: Conv2d                    80
  ├─ conv2: Conv2d                    unit: 1,095 parameters, 4.4 kB of 4.4 kB here, freed after forward
  ├─ norm: GroupNorm                  30
  ├─ fc1: Linear                      unit: 21,690 parameters, 86.8 kB of 86.8 kB here, freed after forward
  └─ fc2: Linear                      910"""


@pytest.mark.parametrize(
    ("name", "knobs", "tree", "blocks"),
    [
        ("gpt", {"dtype": "bf16", "recompute": True, "offload": True}, GPT, "repeated layers: Layer"),
        ("conv", {"at": 1000, "shards": 1}, CONV, "modules of at least 1,000 parameters"),
    ],
)
def test_the_tree_of_units_is_shown_also_while_parameters_are_gathered(
    worlds: Worlds, name: str, knobs: dict[str, Any], tree: str, blocks: str
) -> None:
    (said, after, between), (nothing, *_) = worlds(2).run(said_of, name, knobs)
    assert after == between == tree
    assert said == f"holdfast: {tree}\n  blocks: {blocks}\n"
    assert nothing == ""  # rank 0 speaks for all


def test_a_model_that_was_sharded_by_hand_is_described_alike(worlds: Worlds) -> None:
    for ours, theirs in worlds(2).run(by_hand):
        assert ours == theirs
        assert "3 times: Layer" in ours


def test_what_is_not_sharded_is_told(worlds: Worlds) -> None:
    ((alone,), (ddp,), (partly,)) = worlds(2).run(of_others)[0]
    assert "nothing is sharded" in alone
    assert ddp == "DDP: each of 2 ranks has all of it"
    assert partly == "27 parameters are in no unit: every rank trains its own, and they drift apart"


def test_a_plain_model_is_described_with_its_ties() -> None:
    told = str(holdfast.describe(make("t5")))
    assert told.startswith("T5ForConditionalGeneration: 14,955 parameters, 59.8 kB\n")
    assert "lm_head: Linear                  0, tied to shared.weight\n" in told
    assert "1,407, tied to encoder.embed_tokens.weight, decoder.embed_tokens.weight, lm_head.weight" in told


def test_batch_norms_are_noted(worlds: Worlds) -> None:
    found = worlds(2).run(_notes_on_batch_norm)[0]
    assert found == (
        "1 batch norms see their own rank's batch only, and each rank has running statistics of its own",
    )


def _notes_on_batch_norm(rank: int) -> tuple[str, ...]:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    return holdfast.describe(holdfast.shard(net, quiet=True)).notes
