"""Pure functions for tags, keys, memory and settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.nebula.tag_index import goes_back, key_of, named_step, next_step
from holdfast.adapters.nebula.tag_writer import make_settings, memory_limit
from holdfast.checkpoint.exchange.packed_value import pack, unpack
from holdfast.errors import InvalidInput

GB = 1 << 30


@pytest.mark.parametrize(
    ("tag", "step"),
    [
        ("global_step500", 500),
        ("global_step0", 0),
        ("global_step", None),
        ("best", None),
        ("global_step5x", None),
    ],
)
def test_the_step_of_a_tag(tag: str, step: int | None) -> None:
    assert named_step(tag) == step


@given(st.lists(st.one_of(st.integers(0, 50).map("global_step{}".format), st.text(max_size=3)), max_size=30))
def test_steps_increase_and_are_those_of_increasing_tags(tags: list[str]) -> None:
    last: int | None = None
    for tag in tags:
        step, named = next_step(tag, last), named_step(tag)
        assert last is None or step > last
        if named is not None and (last is None or named > last):
            assert step == named
        last = step


def test_going_back_needs_a_load_and_an_earlier_step() -> None:
    assert goes_back("global_step20", last=30, loaded=10)
    assert goes_back("global_step10", last=30, loaded=10)
    assert not goes_back("global_step40", last=30, loaded=10), "it was only looked at"
    assert not goes_back("global_step20", last=30, loaded=None)
    assert not goes_back("best", last=30, loaded=10)
    assert not goes_back("global_step30", last=30, loaded=30)


@given(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=20))
def test_every_name_has_its_own_valid_key(names: list[str]) -> None:
    keys = [key_of(name) for name in [*names, "rng", "nebula", "%72ng"]]
    assert len(set(keys)) == len({*names, "rng", "nebula", "%72ng"})
    assert not any(set("/@") & set(key) or key in ("", "rng", "nebula") for key in keys)


def test_one_process_has_the_whole_budget_and_several_share_half_of_it() -> None:
    """In Nebula's documentation, each of 4 processes has 25 MB of 200 MB."""
    limit = {"NEBULA_MEMORY_BUFFER_SIZE": "200000000"}
    assert memory_limit({**limit, "LOCAL_WORLD_SIZE": "4"}, GB) == 25_000_000
    assert memory_limit(limit, GB) == 200_000_000
    assert memory_limit({}, 8 * GB) == 4 * GB
    assert memory_limit({"LOCAL_WORLD_SIZE": "2"}, 8 * GB) == 2 * GB


@pytest.mark.parametrize("name", ["NEBULA_MEMORY_BUFFER_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_not_a_number_is_named_in_the_error(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        memory_limit({name: "plenty"}, GB)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_are_packed_unchanged(value: object) -> None:
    packed = pack(value, "value")
    assert packed.kinds == []
    assert unpack(packed.tree, packed.kinds) == value


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidInput, match="contains itself"):
        pack(endless, "endless")


@pytest.mark.parametrize(
    ("path", "interval", "keep"),
    [(["a"], 1, 2), (("a", "b"), 1, 2), ("a", -1, 2), ("a", "x", 2), ("a", 1, 0)],
)
def test_invalid_settings_are_refused(path: object, interval: object, keep: int) -> None:
    with pytest.raises(InvalidInput):
        make_settings(path, interval, keep, None, {})
