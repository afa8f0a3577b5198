"""Random meshes, placements and uneven sizes: saved in one layout, restored in another, equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elastic.conftest import Worlds
from elastic.draws import DTYPES, MESHES, Case, Drawn, trip

pytestmark = pytest.mark.ranks


@st.composite
def placements_for(draw: st.DrawFn, mesh: int, num_dims: int) -> tuple[Any, ...]:
    """Placements of one tensor on a mesh; two cuts of one dimension go left to right, or strided."""
    kinds: list[Any] = ["r", *range(num_dims)]
    some = st.tuples(*[st.sampled_from(kinds) for _ in MESHES[mesh]])
    plain: list[st.SearchStrategy[tuple[Any, ...]]] = [st.just(("p",)), some, some, some]
    if MESHES[mesh] == (2, 2) and num_dims:
        plain.append(st.just(("s0", 0)))
    return draw(st.one_of(plain))


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Up to eight tensors, and another layout for each."""
    mesh, other = draw(st.integers(0, len(MESHES) - 1)), draw(st.integers(0, len(MESHES) - 1))
    tensors, others = [], []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = draw(st.integers(0, len(DTYPES) - 1))
        tensors.append(Drawn(shape, dtype, draw(placements_for(mesh, len(shape)))))
        others.append(draw(placements_for(other, len(shape))))
    return Case(mesh, tuple(tensors), other, tuple(others))


def check(worlds: Worlds, home: Path, cases: list[Case]) -> None:
    answers = worlds(4).run(trip, home, cases)
    assert answers == [sum(len(case.tensors) for case in cases)] * 4


UNSHRUNK = tuple(phase for phase in Phase if phase is not Phase.shrink)
SLACK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example]


# The first example is always the smallest there is.
@pytest.mark.slow
@settings(max_examples=8, phases=UNSHRUNK, suppress_health_check=SLACK)
@given(cases=st.lists(drawn_cases(), min_size=8, max_size=8))
def test_many_random_layouts_load_each_other(
    worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, cases: list[Case]
) -> None:
    check(worlds, tmp_path_factory.mktemp("home"), cases)
