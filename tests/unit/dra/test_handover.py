"""Questions and answers by file: none is taken for another, none waits for ever."""

import json
import os
from pathlib import Path

import pytest

from nri_numa.dra import handover
from nri_numa.dra.claims import InvalidClaim
from nri_numa.dra.handover import ClaimFileRequester, ClaimFileResponder

UID = "0a1b2c3d-0000-4000-8000-00000000000a"


def asker(directory: Path, answer: object, patience: float = 60.0) -> ClaimFileRequester:
    """One whose publisher answers in each pause; a text goes out as it is."""
    teller = ClaimFileResponder(str(directory))

    def pause(seconds: float) -> None:
        for id, question in teller.pending_requests():
            assert question == {"namespace": "shop", "name": "four", "uid": UID}
            if isinstance(answer, dict):
                teller.write_answer_if_still_asked(id, answer)
            elif answer is not None:
                (directory / f"answer-{id}.json").write_text(str(answer))

    return ClaimFileRequester(str(directory), patience=patience, sleep=pause)


def test_a_claim_is_handed_over_and_nothing_stays(tmp_path: Path) -> None:
    found = asker(tmp_path, {"claim": {"metadata": {}}}).fetch_claim("shop", "four", UID)
    assert found == {"metadata": {}}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"problem": "get resourceclaims: 403"}, "claim shop/four: get resourceclaims: 403"),
        ("no json", "document is not valid"),
        ("[]", "document is not valid"),
        ("x" * (300 << 10), "is larger than"),
    ],
)
def test_what_is_no_claim_is_said(tmp_path: Path, answer: object, words: str) -> None:
    with pytest.raises(InvalidClaim, match=words):
        asker(tmp_path, answer).fetch_claim("shop", "four", UID)
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidClaim, match="nri-numa publish did not hand it over in 0 s"):
        asker(tmp_path, None, patience=0).fetch_claim("shop", "four", UID)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidClaim, match=r"dra\.handoverDir: .*No such file"):
        asker(tmp_path / "none", None).fetch_claim("shop", "four", UID)


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "ask-0000000000000000.json").write_text("{}")
    (tmp_path / "answer-0000000000000000.json").write_text("{}")
    for name in ("ask-0000000000000000", "answer-0000000000000000", "registered"):
        (tmp_path / f".{name}.json.0a1b2c3d.new").write_text("{")
    (tmp_path / "registered.json").write_text("{}")
    ClaimFileRequester(str(tmp_path)).remove_leftovers()
    assert [one.name for one in tmp_path.iterdir()] == ["registered.json"]
    (tmp_path / "registered.json").unlink()
    assert list(tmp_path.iterdir()) == []
    ClaimFileRequester(str(tmp_path / "none")).remove_leftovers()


def test_an_answer_to_a_question_that_is_taken_back_meanwhile_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was killed, or waited long enough, between our look and our write."""
    (tmp_path / "ask-0000000000000000.json").write_text("{}")
    real = handover.write_file_atomically

    def slow(path: str, text: str) -> None:
        ClaimFileRequester(str(tmp_path)).remove_leftovers()
        real(path, text)

    monkeypatch.setattr(handover, "write_file_atomically", slow)
    ClaimFileResponder(str(tmp_path)).write_answer_if_still_asked("0" * 16, {})
    assert list(tmp_path.iterdir()) == []


def test_questions_that_are_none_are_left(tmp_path: Path) -> None:
    teller = ClaimFileResponder(str(tmp_path))
    (tmp_path / "ask-0000000000000000.json").write_text("[]")
    (tmp_path / "ask-0000000000000001.json").write_text("{")
    (tmp_path / "ask-0000000000000002.json").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "ask-0000000000000003.json")
    (tmp_path / "other.json").write_text("{}")
    assert teller.pending_requests() == []


def test_an_answer_that_nobody_waits_for_is_not_written(tmp_path: Path) -> None:
    teller = ClaimFileResponder(str(tmp_path))
    (tmp_path / "ask-0000000000000000.json").write_text("{}")
    ((id, _),) = teller.pending_requests()
    (tmp_path / "ask-0000000000000000.json").unlink()
    teller.write_answer_if_still_asked(id, {"claim": {}})
    assert list(tmp_path.iterdir()) == []


def test_each_registration_is_another_text(tmp_path: Path) -> None:
    teller, asking = ClaimFileResponder(str(tmp_path)), ClaimFileRequester(str(tmp_path))
    said = [teller.read_registration_marker()]
    for _ in range(2):
        asking.write_registration_marker()
        said.append(teller.read_registration_marker())
    assert len(set(said)) == 3
    assert said[0] == ""
    assert json.loads(said[2])["times"] == 2
    ClaimFileRequester(str(tmp_path / "none")).write_registration_marker()
