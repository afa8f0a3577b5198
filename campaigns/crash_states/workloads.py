"""Workloads whose crash states are explored, as data: the processes of each, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Act:
    """One process of a workload, or one world of ranks."""

    name: str  # of a function of `trainer`
    numbers: tuple[int, ...]  # branch, first step, last step, checkpoints that stay
    world_size: int = 1
    kill_at: str = ""  # HOLDFAST_KILL_AT; the process itself then ends with SIGKILL unless `kills_keeper`
    kills_keeper: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Processes that run one after the other, and how their states are checked."""

    name: str
    summary: str
    acts: tuple[Act, ...]
    keep: int | None = None  # checkpoints that must stay; None: no more than the newest is looked for
    has_local: bool = False
    is_wide: bool = False  # its tensors are those of `trainer.WIDE`
    is_bucket: bool = False  # it writes a write-back directory, and `bucket` is checked
    restores: bool = True  # a Checkpointer restores it; else holdfast.open reads it
    fsync_delay_us: int = 2000  # each fsync waits so long, as on a busy disk


WORKLOADS = (
    Workload("one rank", "twelve saves, some close to each other", (Act("save", (1, 1, 12, 0)),), keep=99),
    Workload("retention", "16 saves of which 2 stay", (Act("save", (1, 1, 16, 2)),), keep=2),
    Workload(
        "direct writes",
        "saves of 1.25 MiB past the page cache, and a second start",
        (Act("save_wide", (1, 1, 4, 2)), Act("save_wide", (2, 5, 7, 2))),
        keep=2,
        is_wide=True,
    ),
    Workload(
        "tiers",
        "a local folder, every second save drained to home, two starts",
        (Act("save_tiered", (1, 1, 8, 2)), Act("save_tiered", (2, 9, 12, 2))),
        has_local=True,
    ),
    Workload("two ranks", "two gloo ranks", (Act("save_rank", (1, 1, 7, 2), world_size=2),), keep=2),
    Workload(
        "three ranks",
        "three gloo ranks, with slow fsyncs",
        (Act("save_rank", (1, 1, 7, 2), world_size=3),),
        keep=2,
        fsync_delay_us=20_000,
    ),
    Workload(
        "four ranks",
        "four gloo ranks, with slow fsyncs",
        (Act("save_rank", (1, 1, 6, 2), world_size=4),),
        keep=2,
        fsync_delay_us=20_000,
    ),
    Workload(
        "frozen tensors",
        "frozen tensors whose file is linked from save to save, two starts",
        (Act("save_frozen", (1, 1, 6, 2)), Act("save_frozen", (2, 7, 10, 2))),
        keep=2,
    ),
    Workload(
        "killed trainer",
        "kill -9 of the trainer right after it has handed a save over; the keeper finishes",
        (
            Act("save_until_killed", (1, 1, 9, 3), kill_at="trainer.handed:4"),
            Act("save_until_killed", (2, 5, 9, 3)),
        ),
    ),
    Workload(
        "killed keeper",
        "kill -9 of the keeper between data and part; the trainer starts another",
        (
            Act("save_until_killed", (1, 1, 8, 3), kill_at="keeper.data:3", kills_keeper=True),
            Act("save_until_killed", (2, 9, 12, 3)),
        ),
    ),
    Workload(
        "going back",
        "restores of an older step, twice, and other saves of the same steps",
        (Act("save", (1, 1, 6, 5)), Act("save_again", (2, 4, 7, 5))),
    ),
    Workload(
        "done marker",
        "the loop of steps() to its end, trained further once",
        (Act("loop", (1, 0, 6, 2)), Act("loop", (2, 0, 9, 2))),
    ),
    Workload(
        "nebula",
        "tags of two files through Nebula's interface",
        (Act("save_nebula", (1, 1, 8, 2)),),
        restores=False,
    ),
    Workload(
        "dcp",
        "saves through torch.distributed.checkpoint",
        (Act("save_dcp", (1, 1, 7, 2)),),
        keep=2,
        restores=False,
    ),
    Workload(
        "import", "an import of a torch.save file", (Act("import_file", (1, 0, 10, 0)),), restores=False
    ),
    Workload(
        "write-back directory",
        "files and a file that names the newest, sent in their order",
        (Act("write_back", (1, 1, 12, 0)),),
        is_bucket=True,
        restores=False,
    ),
)
"""Every workload, in the order in which they are explored."""
