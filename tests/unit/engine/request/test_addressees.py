"""Names of containers in annotations, in both spellings, and nobody else's annotations."""

from __future__ import annotations

import pytest

from nri_numa.engine.request.annotations import Missing, addressees

PREFIX = "numa.kubernetes.io"


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        ("numa.kubernetes.io/numacpu.web", "web"),
        ("numa.kubernetes.io/policy.web", "web"),
        ("numacpu.numa.kubernetes.io/container.web", "web"),
        # The whole pod, or nobody.
        ("numa.kubernetes.io/numacpu", None),
        ("numa.kubernetes.io/numacpu.", None),
        ("numacpu.numa.kubernetes.io/pod", None),
        ("numacpu.numa.kubernetes.io/container.", None),
        # What we write ourselves, what is refused as unknown, and what is somebody else's.
        ("numa.kubernetes.io/assigned.web", None),
        ("numa.kubernetes.io/numacpuu.web", None),
        ("other.io/numacpu.web", None),
        ("xnuma.kubernetes.io/numacpu.web", None),
        ("numacpu.web", None),
        ("numa.kubernetes.io", None),
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
