"""Worlds of 1 to 4 ranks, each made once when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from elastic.world import World

Worlds = Callable[[int], World]
MOST_FUNCTIONS = 30


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """The world of so many ranks; one that has lost a rank is made anew, and so is one of many functions.

    Each process group that a function makes has threads that poll until the process ends: torch's caches of
    DTensor refer to it, so it cannot be destroyed before.
    """
    made: dict[int, World] = {}

    def world(size: int) -> World:
        if size in made and not all(process.is_alive() for process in made[size].processes):
            made.pop(size).kill()
        elif size in made and made[size].num_started >= MOST_FUNCTIONS:
            made.pop(size).close()
        if size not in made:
            made[size] = World(size, tmp_path_factory.mktemp(f"world-{size}"))
        return made[size]

    yield world
    for one in made.values():
        one.close()


@pytest.fixture
def broken_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """Worlds for tests that kill ranks; nothing of them is used again."""
    made: list[World] = []

    def world(size: int) -> World:
        made.append(World(size, tmp_path_factory.mktemp("broken")))
        return made[-1]

    yield world
    for one in made:
        one.kill()
