"""The table of phases is complete and has no trap."""

from __future__ import annotations

from nri_numa.nri.wire.phases import TRANSITIONS, Phase, Step


def test_every_phase_has_a_row_and_nothing_leads_out_of_the_end() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert TRANSITIONS[Phase.CLOSED] == TRANSITIONS[Phase.DEAD] == {}


def test_every_phase_but_the_ends_can_be_reached_and_leads_on_to_active() -> None:
    reachable, todo = {Phase.CONNECTED}, [Phase.CONNECTED]
    while todo:
        for following in TRANSITIONS[todo.pop()].values():
            if following not in reachable:
                reachable.add(following)
                todo.append(following)
    assert reachable == set(Phase) - {Phase.CLOSED, Phase.DEAD}


def test_no_event_is_legal_before_the_runtime_has_configured_us() -> None:
    legal = {phase for phase, row in TRANSITIONS.items() if Step.EVENT in row}
    assert legal == {Phase.CONFIGURED, Phase.ACTIVE}
