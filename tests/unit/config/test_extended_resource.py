"""Names of the extended resource: what the API server refuses is a mistake of the configuration."""

from __future__ import annotations

import pytest

from nri_numa.config.extended_resource import resource_problems
from nri_numa.config.sections import DevicePlugin


def problems(name: str) -> list[str]:
    return list(resource_problems(DevicePlugin(resource_name=name)))


@pytest.mark.parametrize(
    "name",
    [
        "numa.example.com/exclusive-cpu",
        "a/b",
        "example.com/Exclusive_CPU.v1",
        "mykubernetes.iox/cpu",
        f"{'a' * 244}/{'b' * 63}",
    ],
)
def test_good_names(name: str) -> None:
    assert problems(name) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exclusive-cpu", "has no prefix"),
        ("numa.kubernetes.io/exclusive-cpu", "below kubernetes.io"),
        ("kubernetes.io/cpu", "below kubernetes.io"),
        ("mykubernetes.io/cpu", "below kubernetes.io"),  # the API server looks for the text
        ("requests.example.com/cpu", "language of quotas"),
        ("Example.com/cpu", "no DNS name"),
        ("/cpu", "no DNS name"),
        (f"{'a' * 245}/b", "no DNS name"),
        ("example.com/", "after the slash"),
        ("example.com/-cpu", "after the slash"),
        ("example.com/a/b", "after the slash"),
        ("example.com/cpü", "after the slash"),
        (f"a/{'b' * 64}", "after the slash"),
    ],
)
def test_bad_names_are_told_with_what_was_expected(name: str, words: str) -> None:
    (problem,) = problems(name)
    assert problem.startswith("devicePlugin.resourceName: ")
    assert words in problem
    assert "expected" in problem


def test_a_directory_that_has_no_room_for_a_socket() -> None:
    for directory in ("device-plugins", "/" + "d" * 100):
        (problem,) = resource_problems(DevicePlugin(directory=directory))
        assert problem.startswith("devicePlugin.directory: ")
    assert not list(resource_problems(DevicePlugin(directory="/var/lib/kubelet/device-plugins")))
