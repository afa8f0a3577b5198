"""Schema of task files: all keys, and the shapes of their values.

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
    optional,
)

MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
STORES = ("S3", "GCS", "AZURE", "R2", "IBM", "OCI", "NEBIUS", "COREWEAVE", "VASTDATA", "HF", "VOLUME")
DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")
_SIZE = Either((NUMBER, TEXT))  # 32, 32+, 32GB
_WORD = Either((TEXT, NUMBER))

STORAGE: Mapping[str, Shape] = {
    "name": optional(TEXT),
    "source": optional(Either((TEXT, ListOf(TEXT)))),
    "store": optional(Scalar((str,), "the name of a store", allowed=STORES)),
    "persistent": FLAG,
    "mode": Scalar((str,), "a mode", allowed=MODES),
    "type": Scalar(
        (str,), "a type", allowed=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")
    ),
    "config": Keys({"mount_cached": Anything(), "mount": Anything()}),
    "_is_sky_managed": FLAG,
    "_bucket_sub_path": optional(TEXT),
    "_force_delete": FLAG,
}
"""Keys of a store in `file_mounts`."""

JOB_RECOVERY: Mapping[str, Shape] = {
    "strategy": optional(TEXT),
    "max_restarts_on_errors": Scalar((int,), "a whole number", least=0),
    "recover_on_exit_codes": Either((WHOLE, ListOf(WHOLE))),
}
"""Keys of `resources.job_recovery`."""

ACCELERATORS = optional(Either((TEXT, MapOf(optional(NUMBER)), ListOf(TEXT))))
"""Accelerators in any form."""
_SINGLE: dict[str, Shape] = {
    "cloud": optional(TEXT),
    "region": optional(TEXT),
    "zone": optional(TEXT),
    "infra": optional(TEXT),
    "cpus": optional(_WORD),
    "memory": optional(_SIZE),
    "accelerators": ACCELERATORS,
    "gpus": ACCELERATORS,
    "instance_type": optional(TEXT),
    "use_spot": FLAG,
    "job_recovery": optional(Either((TEXT, Keys(JOB_RECOVERY)))),
    "spot_recovery": optional(TEXT),
    "volumes": Anything(),
    "disk_size": _SIZE,
    "disk_tier": optional(Scalar((str,), "a disk tier", allowed=DISK_TIERS)),
    "network_tier": optional(Scalar((str,), "a network tier", allowed=("standard", "best"))),
    "local_disk": optional(TEXT),
    "max_hourly_cost": optional(NUMBER),
    "ports": optional(Either((_WORD, ListOf(_WORD)))),
    "labels": optional(MapOf(optional(_WORD))),
    "accelerator_args": optional(MapOf(Anything())),
    "image_id": optional(Either((TEXT, MapOf(optional(TEXT))))),
    "autostop": optional(Either((FLAG, _WORD, MapOf(Anything())))),
    "priority": optional(WHOLE),
    "priority_class": optional(TEXT),
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

_VARIABLES = MapOf(optional(Either((TEXT, NUMBER, FLAG))))

TASK = Keys(
    {
        "name": optional(_WORD),
        "workdir": optional(Either((TEXT, Keys({"url": TEXT, "ref": optional(_WORD)})))),
        "event_callback": optional(TEXT),
        "num_nodes": COUNT,
        "resources": optional(Keys(RESOURCES, "a map of resources")),
        "file_mounts": optional(MapOf(Either((TEXT, Keys(STORAGE, "a map that describes a store"))))),
        "service": Anything(),
        "pool": Anything(),
        "setup": optional(TEXT),
        "run": optional(TEXT),
        "envs": optional(_VARIABLES),
        "secrets": optional(Either((_VARIABLES, ListOf(TEXT)))),
        "managed_secrets": Anything(),
        "inputs": Anything(),
        "outputs": Anything(),
        "file_mounts_mapping": Anything(),
        "config": optional(MapOf(Anything())),
        "volumes": optional(MapOf(Anything())),
        "volume_mounts": Anything(),
        "api_server_access": Anything(),
        "_metadata": Anything(),
    },
    "a map of keys",
)
"""A task."""
