"""Figures of rounds, what is said of them, and their drawing."""

from xml.etree import ElementTree

from nri_numa.cli.measure import measurement_lines
from nri_numa.measure.plan import Comparison, ComparisonSide, ImpossibleComparison, LoopWorker
from nri_numa.measure.results import (
    MeasuredComparison,
    noise_sentences,
    render_results_svg,
    results_document,
)

WORKERS = (LoopWorker(loop="compute", cpu=0),)


def measured(
    good: tuple[float, ...], bad: tuple[float, ...], *, more_is_better: bool = True
) -> MeasuredComparison:
    comparison = Comparison(
        name="n",
        title="<Local> & remote",
        unit="GB/s",
        higher_is_better=more_is_better,
        good_side=ComparisonSide(placed="CPU 1", workers=WORKERS),
        bad=ComparisonSide(placed="CPU 2", workers=WORKERS),
    )
    return MeasuredComparison(comparison, good, bad)


def test_the_gain_is_of_the_medians_whichever_way_is_better() -> None:
    assert measured((4, 10, 11), (5, 5, 5)).gain_factor == 2
    assert measured((5, 5, 5), (4, 10, 11), more_is_better=False).gain_factor == 2
    assert measured((5,), (0,)).gain_factor == float("inf")


def test_a_difference_is_clear_when_no_round_contradicts_it() -> None:
    assert measured((10, 11), (5, 6)).is_conclusive
    assert measured((5, 6), (10, 11)).is_conclusive, "for the worse too"
    assert not measured((10, 5), (6, 4)).is_conclusive


def test_what_disturbs_is_said_and_nothing_when_nothing_did() -> None:
    calm = measured((10, 10.1), (5, 5.1))
    assert noise_sentences(load=0.1, cpus=2, steal=0.0, outcomes=[calm], usage=0.01) == ()
    assert noise_sentences(load=0.1, cpus=2, steal=None, outcomes=[], usage=None) == ()
    wild = measured((10, 20), (5, 5))
    told = noise_sentences(load=3.0, cpus=2, steal=0.05, outcomes=[wild], usage=0.5)
    assert told == (
        "the CPUs that were used were 50% busy with something else before",
        "the load average was 3.0 on 2 CPUs when it began",
        "the host took 5.0% of the CPU time for others (steal)",
        "rounds of n (good side) differ by 67 %",
    )


def test_a_document_is_told_as_a_table_and_drawn() -> None:
    made = results_document(
        [
            measured((10, 11, 12), (5, 5, 5)),
            measured((10, 5), (6, 4)),
            ImpossibleComparison(name="x", title="X", because="there is one"),
        ],
        ["the load"],
        "2026-11-22",
    )
    assert made["comparisons"][0]["good"]["rounds"] == [10, 11, 12]
    assert made["comparisons"][0]["gain"] == 2.2
    text = "\n".join(measurement_lines(made))
    assert "2.20 times as much" in text
    assert "no clear difference" in text
    assert "Not shown here: X, because there is one." in text
    assert "  - the load" in text
    quiet = "\n".join(measurement_lines({**made, "noise": []}))
    assert quiet.endswith("The machine was idle during the measurement.")
    drawn = ElementTree.fromstring(render_results_svg(made))
    words = " ".join(drawn.itertext())
    assert "<Local> & remote" in words
    assert "2.20 times as much" in words
    assert "because there is one" in words
    assert "Noise: the load" in words


def test_a_time_that_is_less_is_faster() -> None:
    made = results_document([measured((5, 5), (10, 11), more_is_better=False)], [], "now")
    assert "2.10 times as fast" in "\n".join(measurement_lines(made))
    assert "2.10 times as fast" in render_results_svg(made)
