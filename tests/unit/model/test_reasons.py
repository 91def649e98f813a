"""Reasons of rejections, and the one place that reads one out of what others wrap around it."""

import msgspec
import pytest

from nri_numa.model.reasons import RejectionReason, RetryCondition, read_reason_and_detail

REJECTED = "pod shop/web, container app: cpu: 8 exclusive CPUs needed, 6 free"


@pytest.mark.parametrize(
    "text",
    [
        f"NotEnoughCPUs: {REJECTED}",
        f"failed to create containerd container: NotEnoughCPUs: {REJECTED}",
        f'rpc error: code = Unknown desc = "NotEnoughCPUs: {REJECTED}',
    ],
)
def test_a_rejection_is_found_in_what_runtime_and_kubelet_say(text: str) -> None:
    found = read_reason_and_detail(text, "shop/web", "app")
    assert found == ("NotEnoughCPUs", "cpu: 8 exclusive CPUs needed, 6 free")


@pytest.mark.parametrize(
    "text",
    ["", "image not found", f"8: {REJECTED}", f"NotEnoughCPUs: {REJECTED}".replace("web", "db")],
)
def test_what_is_no_rejection_of_this_container_is_none(text: str) -> None:
    assert read_reason_and_detail(text, "shop/web", "app") is None


def test_others_move_for_room_alone() -> None:
    for reason in RejectionReason:
        assert not reason.allows_moves or reason.retry is RetryCondition.ROOM


def test_a_former_reason_is_read_by_its_new_name_and_another_text_is_none() -> None:
    assert msgspec.convert("CPUOwned", RejectionReason) is RejectionReason.CPU_EXCLUSIVE
    with pytest.raises(msgspec.ValidationError, match="Nonsense"):
        msgspec.convert("Nonsense", RejectionReason)
