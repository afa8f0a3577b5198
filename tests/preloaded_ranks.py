"""Imports of the tests' ranks, which are made once, in the process that ranks are forked from."""

from __future__ import annotations

import gc

import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler

import holdfast.adapters.dcp
import holdfast.checkpoint.run

__all__ = ["holdfast", "pytest", "torch"]

gc.collect()
gc.freeze()  # what ranks share is neither copied nor looked through by their garbage collection
