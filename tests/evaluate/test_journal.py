"""An interrupted evaluation goes on from what is on disk, and only if it is the same one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.journal import END, NAME, Journal

SETTINGS = {"slots": "4", "machine": "one"}


def test_what_is_done_is_not_made_again(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, int]:
        made.append(name)
        return {"figure": len(name)}

    def take(journal: Journal, *names: str) -> list[object]:
        return [journal.take(name, partial(make, name)) for name in names]

    take(Journal(tmp_path, SETTINGS, resumes=False), "a", "bb")
    found = take(Journal(tmp_path, SETTINGS, resumes=True), "a", "bb", "ccc")
    assert found == [{"figure": 1}, {"figure": 2}, {"figure": 3}]
    assert made == ["a", "bb", "ccc"]


def test_each_case_is_on_disk_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS, resumes=False)
    journal.add("a", {"x": 1.5})
    assert (tmp_path / NAME).read_text().splitlines()[1] == '{"key":"a","result":{"x":1.5}}'


def test_a_torn_last_line_is_taken_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS, resumes=False)
    journal.add("a", 1)
    journal.add("b", 2)
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-4])
    resumed = Journal(tmp_path, SETTINGS, resumes=True)
    assert "a" in resumed
    assert "b" not in resumed
    resumed.add("c", 3)
    again = Journal(tmp_path, SETTINGS, resumes=True)
    assert (again["a"], again["c"], len(again)) == (1, 3, 2)


def test_a_failed_case_is_run_again_and_what_was_made_from_it_if_it_changed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS, resumes=False)
    journal.add("measured", {"error": "no second core"})
    journal.add("good", {"error": "", "figure": 3})
    assert [journal.take("sum", partial(list, "a"), given) for given in (1, 1)] == [["a"], ["a"]]
    resumed = Journal(tmp_path, SETTINGS, resumes=True)
    assert resumed.num_failed == 1
    assert "measured" not in resumed
    assert resumed["good"] == {"error": "", "figure": 3}
    assert resumed.take("sum", partial(list, "b"), 1) == ["a"]
    assert resumed.take("sum", partial(list, "c"), 2) == ["c"]
    # The last one of a key counts.
    assert Journal(tmp_path, SETTINGS, resumes=True)["sum"] == ["c"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**SETTINGS, "slots": "8"}, "has slots '4', this one '8'"),
        ({"slots": "4"}, "has machine 'one', this one 'none'"),
        ({**SETTINGS, "vllm": "0.31"}, "has vllm 'none', this one '0.31'"),
    ],
)
def test_another_evaluation_does_not_go_on(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    Journal(tmp_path, SETTINGS, resumes=False).add("a", 1)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(InvalidInputError, match="--resume") as caught:
        Journal(tmp_path, settings, resumes=True)
    assert words in caught.value.message
    assert (tmp_path / NAME).read_bytes() == before


def test_an_incomplete_evaluation_is_not_overwritten_and_a_complete_one_is(tmp_path: Path) -> None:
    Journal(tmp_path, SETTINGS, resumes=False)
    # Nothing is lost of a run that ended before its first case.
    journal = Journal(tmp_path, SETTINGS, resumes=False)
    journal.add("a", 1)
    with pytest.raises(InvalidInputError, match="go on with --resume"):
        Journal(tmp_path, SETTINGS, resumes=False)
    journal.add(END, None)
    assert len(Journal(tmp_path, {**SETTINGS, "slots": "8"}, resumes=False)) == 0


def test_there_must_be_something_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has no evaluation"):
        Journal(tmp_path, SETTINGS, resumes=True)


def test_the_begin_stays_that_of_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / NAME
    Journal(tmp_path, SETTINGS, resumes=False)
    path.write_text(path.read_text().replace('"began":"2', '"began":"1'))
    assert Journal(tmp_path, SETTINGS, resumes=True).began.startswith("1")
