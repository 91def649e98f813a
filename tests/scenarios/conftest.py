"""What every scenario ends with."""

from collections.abc import Iterator

import pytest

from tests.beds.world import World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """A node as the module's ``usual`` makes them."""
    made: World = request.module.usual()
    return made


@pytest.fixture(autouse=True)
def all_holds_in_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every world of a scenario is checked."""
    made: list[World] = []
    make = World.__init__

    def remembered(world: World, *args: object, **more: object) -> None:
        make(world, *args, **more)
        made.append(world)

    monkeypatch.setattr(World, "__init__", remembered)
    yield
    for world in made:
        if world.ends_whole:
            world.check()
