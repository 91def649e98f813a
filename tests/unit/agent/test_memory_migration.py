"""Memory that would not move: said where it is any, and tried again after a while."""

import io
import itertools
import re
from collections.abc import Iterator

import pytest

from nri_numa.agent.memory_migration import MAX_MIGRATION_PASSES
from nri_numa.machine.migration import MigrationStep
from nri_numa.model.cpuset import NUMASet
from nri_numa.observe import logs
from tests.beds.room_cases import (
    A_AND_B,
    MIB,
    SteppingClock,
    create_new,
    migrated_notices,
    movable_world,
)
from tests.beds.views import live_view


@pytest.mark.parametrize(
    ("error", "passes", "why"),
    [
        (None, MAX_MIGRATION_PASSES, "65 MiB did not migrate (busy)"),
        (OSError(1, "not permitted"), 1, "not permitted"),
    ],
)
def test_what_would_not_move_is_said_and_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None, passes: int, why: str
) -> None:
    monkeypatch.setattr("nri_numa.agent.memory_migration.UNMOVED_RETRY_S", 60.0)
    (a, b) = A_AND_B
    world, clock, at = (
        movable_world((*a[:3], {"movable": "false"}), b),
        SteppingClock(),
        list[float](),
    )
    create_new(world)
    world.synchronize()

    def migrate(*of_what: object) -> Iterator[MigrationStep]:
        at.append(clock.passed)
        if error is not None:
            raise error
        yield MigrationStep(MIB, 65 * MIB, "busy")

    migrated_notices(world, clock, migrate)
    tries = at[::passes]
    assert len(tries) > 1
    assert all(after - before >= 60 for before, after in itertools.pairwise(tries))
    notice = world.history.notices.notices_after()[-1]
    assert (notice.reason, notice.count) == ("PartlyMigrated", len(tries))
    assert notice.message == f"partly moved from NUMA node 1 to 0: {why}"
    assert world.agent.current.state.allocations["b-app"].migrating_from == NUMASet([1])


@pytest.mark.parametrize(
    ("left", "said"), [(4096, ""), (3 * MIB, f" unmigrated_bytes={3 * MIB} problem=busy")]
)
def test_what_rounds_to_nothing_is_not_left(left: int, said: str) -> None:
    world, output = movable_world(*A_AND_B), io.StringIO()
    logs.setup_logging("info", stream=output)
    create_new(world)
    world.synchronize()
    migrated_notices(world, SteppingClock(), lambda *of: iter([MigrationStep(MIB, left, "busy")]))
    (line,) = (one for one in output.getvalue().splitlines() if "memory migrated" in one)
    assert re.sub(r".* duration_s=\S+", "", line) == said


def test_the_memory_of_a_container_that_ends_moves_no_further() -> None:
    """What has moved until then is shown meanwhile, and no longer."""
    world, shown = movable_world(*A_AND_B), list[str]()
    create_new(world)
    world.synchronize()
    view, migrating = live_view(world.agent), world.agent.containers.migrating

    def migrate(*of_what: object) -> Iterator[MigrationStep]:
        yield MigrationStep(8 * MIB, 0)
        (moving,) = (a for a in view.list_assignments().containers if a.id == "b-app")
        shown.append(moving.migration)
        world.stop("b-app")
        yield MigrationStep(8 * MIB, 0)
        raise AssertionError("its pages are looked at no more")

    assert migrated_notices(world, SteppingClock(), migrate) == []
    assert (shown, migrating) == (["from NUMA node 1 to 0, 8 MiB so far"], {})
