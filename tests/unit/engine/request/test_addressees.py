"""Names of containers in annotations, in both spellings, and nobody else's annotations."""

from __future__ import annotations

import pytest

from nri_numa.engine.request.annotations import MOST_GUESSES, Missing, addressees, misspelt

PREFIX = "numa.kubernetes.io"


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        ("numa.kubernetes.io/numacpu.web", "web"),
        ("numacpu.numa.kubernetes.io/container.web", "web"),
        # The whole pod, or nobody.
        ("numa.kubernetes.io/numacpu.", None),
        ("numacpu.numa.kubernetes.io/pod", None),
        ("numacpu.numa.kubernetes.io/container.", None),
        # What we write ourselves, what is refused as unknown, and what is somebody else's.
        ("numa.kubernetes.io/assigned.web", None),
        ("numa.kubernetes.io/numacpuu.web", None),
        ("other.io/numacpu.web", None),
        ("xnuma.kubernetes.io/numacpu.web", None),
        ("numacpu.numa.kubernetes.io", None),
        ("numa.kubernetes.io/numacpu." + "x" * 64, None),
    ],
)
def test_whom_an_annotation_speaks_to(annotation: str, name: str | None) -> None:
    assert addressees({annotation: "0"}, PREFIX) == ({} if name is None else {name: annotation})


def test_the_sentence_names_who_was_perhaps_meant() -> None:
    one = Missing(annotation="a/numacpu.enigne", name="enigne", had=("engine", "proxy"))
    assert one.sentence == (
        "annotation a/numacpu.enigne is ignored, because it names a container 'enigne', which "
        "this pod does not have; it has 'engine', 'proxy' (did you mean engine?)"
    )
    assert Missing(annotation="a", name="x", had=()).sentence.endswith("it has none")


@pytest.mark.parametrize(
    ("annotation", "meant"),
    [
        ("numa.kubernets.io/policy", "numa.kubernetes.io/policy"),
        ("nuam.kubernetes.io/policy.web", "numa.kubernetes.io/policy.web"),
        ("NUMA.kubernetes.io/cpus", "numa.kubernetes.io/cpus"),
        ("numacpu.numa.kubernetes.com/pod", "numacpu.numa.kubernetes.io/pod"),
        ("numacpu.numa.kubernetes.i/pod", "numacpu.numa.kubernetes.io/pod"),
        # Right as it is, nothing of ours, and domains that are in use.
        ("numa.kubernetes.io/policy", None),
        ("numacpu.numa.kubernetes.io/container.web", None),
        ("numa.kubernets.io/polcy", None),
        ("sub.numa.kubernetes.io/policy", None),
        ("node.kubernetes.io/policy", None),
        ("kubernetes.io/policy", None),
        ("policy", None),
    ],
)
def test_a_prefix_that_is_nearly_ours_is_taken_for_a_slip(
    annotation: str, meant: str | None
) -> None:
    found = misspelt({annotation: "x"}, PREFIX)
    assert [f"(did you mean {meant}?)" in one for one in found] == ([True] if meant else [])


def test_of_many_slips_a_few_are_named() -> None:
    many = {f"numa.kubernets.io/policy.c{n}": "x" for n in range(1000)}
    assert len(misspelt(many, PREFIX)) == MOST_GUESSES
