"""Every key that a task file may have, and what may stand there.

Source: skypilot 0.14.1, sky/utils/schemas.py (task, resources, storage).
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.jobs.task.shape import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Anything,
    Either,
    Keys,
    ListOf,
    MapOf,
    Scalar,
    Shape,
    or_nothing,
)

MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
STORES = ("S3", "GCS", "AZURE", "R2", "IBM", "OCI", "NEBIUS", "COREWEAVE", "VASTDATA", "HF", "VOLUME")
DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")
_SIZE = Either((NUMBER, TEXT))  # 32, 32+, 32GB
_WORD = Either((TEXT, NUMBER))

STORAGE: Mapping[str, Shape] = {
    "name": or_nothing(TEXT),
    "source": or_nothing(Either((TEXT, ListOf(TEXT)))),
    "store": or_nothing(Scalar((str,), "the name of a store", allowed=STORES)),
    "persistent": FLAG,
    "mode": Scalar((str,), "a mode", allowed=MODES),
    "type": Scalar(
        (str,),
        "a type",
        allowed=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW"),
    ),
    "config": Keys({"mount_cached": Anything(), "mount": Anything()}),
    "_is_sky_managed": FLAG,
    "_bucket_sub_path": or_nothing(TEXT),
    "_force_delete": FLAG,
}
"""Keys of a store in `file_mounts`."""

JOB_RECOVERY: Mapping[str, Shape] = {
    "strategy": or_nothing(TEXT),
    "max_restarts_on_errors": Scalar((int,), "a whole number", least=0),
    "recover_on_exit_codes": Either((WHOLE, ListOf(WHOLE))),
}
"""Keys of `resources.job_recovery`."""

_ACCELERATORS = Either((TEXT, MapOf(or_nothing(NUMBER)), ListOf(TEXT)))
_SINGLE: dict[str, Shape] = {
    "cloud": or_nothing(TEXT),
    "region": or_nothing(TEXT),
    "zone": or_nothing(TEXT),
    "infra": or_nothing(TEXT),
    "cpus": or_nothing(_WORD),
    "memory": or_nothing(_SIZE),
    "accelerators": or_nothing(_ACCELERATORS),
    "instance_type": or_nothing(TEXT),
    "use_spot": FLAG,
    "job_recovery": or_nothing(Either((TEXT, Keys(JOB_RECOVERY)))),
    "spot_recovery": or_nothing(TEXT),
    "volumes": Anything(),
    "disk_size": _SIZE,
    "disk_tier": or_nothing(Scalar((str,), "a disk tier", allowed=DISK_TIERS)),
    "network_tier": or_nothing(Scalar((str,), "a network tier", allowed=("standard", "best"))),
    "local_disk": or_nothing(TEXT),
    "max_hourly_cost": or_nothing(NUMBER),
    "ports": or_nothing(Either((_WORD, ListOf(_WORD)))),
    "labels": or_nothing(MapOf(or_nothing(_WORD))),
    "accelerator_args": or_nothing(MapOf(Anything())),
    "image_id": or_nothing(Either((TEXT, MapOf(or_nothing(TEXT))))),
    "autostop": or_nothing(Either((FLAG, _WORD, MapOf(Anything())))),
    "priority": or_nothing(WHOLE),
    "priority_class": or_nothing(TEXT),
    "_docker_login_config": Anything(),
    "_docker_username_for_runpod": Anything(),
    "_requires_fuse": Anything(),
    "_cluster_config_overrides": Anything(),
    "_no_missing_accel_warnings": Anything(),
}
RESOURCES: Mapping[str, Shape] = {
    **_SINGLE,
    "any_of": ListOf(Keys(_SINGLE, "a map of resources")),
    "ordered": ListOf(Keys(_SINGLE, "a map of resources")),
}
"""Keys of `resources`."""

_VARIABLES = MapOf(or_nothing(Either((TEXT, NUMBER, FLAG))))

TASK = Keys(
    {
        "name": or_nothing(_WORD),
        "workdir": or_nothing(Either((TEXT, Keys({"url": TEXT, "ref": or_nothing(_WORD)})))),
        "event_callback": or_nothing(TEXT),
        "num_nodes": COUNT,
        "resources": or_nothing(Keys(RESOURCES, "a map of resources")),
        "file_mounts": or_nothing(MapOf(Either((TEXT, Keys(STORAGE, "a map that describes a store"))))),
        "service": Anything(),
        "pool": Anything(),
        "setup": or_nothing(TEXT),
        "run": or_nothing(TEXT),
        "envs": or_nothing(_VARIABLES),
        "secrets": or_nothing(Either((_VARIABLES, ListOf(TEXT)))),
        "managed_secrets": Anything(),
        "inputs": Anything(),
        "outputs": Anything(),
        "file_mounts_mapping": Anything(),
        "config": or_nothing(MapOf(Anything())),
        "volumes": or_nothing(MapOf(Anything())),
        "volume_mounts": Anything(),
        "api_server_access": Anything(),
        "_metadata": Anything(),
    },
    "a map of keys",
)
"""A task."""
