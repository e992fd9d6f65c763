"""Plans of commits for ranks that do not exist: made, proven, kept, and refused before any read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.errors import CorruptionError, InvalidInputError, MismatchError, NotFoundError
from cas_ckpt.index.plans import PlanRow
from cas_ckpt.layout.target_layout import parse_layout
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Spec
from cas_ckpt.ops.plan import chunked_tensors, kept_plans, plan_checkout, plan_tensors
from cas_ckpt.ops.plan_report import as_json, decode_report, encode_report, read_json
from cas_ckpt.ops.records import commit_of
from cas_ckpt.ops.resolve import resolve
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.training.verbs import commit_state
from tests.builders import make_handle

SHAPES = {"model/wq.weight": (1024, 1024), "model/wo.weight": (1024, 1024), "model/norm.weight": (1024,)}


@pytest.fixture
def handle() -> RepositoryHandle:
    """A repository with one commit."""
    made = make_handle()
    commit_numbers(made, 0)
    return made


def commit_numbers(handle: RepositoryHandle, first: int) -> None:
    weights = {
        key.removeprefix("model/"): np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)
        for key, shape in SHAPES.items()
    }
    commit_state(handle, {"model": weights, "step": 3, "small": np.zeros(3)}, message="m")
