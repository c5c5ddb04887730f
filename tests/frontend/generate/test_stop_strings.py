"""Stop strings over text in pieces: where the pieces are cut makes no difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.frontend.generate.answer_text import StopMatch, StopStrings

ALPHABET = st.sampled_from("ab#")


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """All that may be shown, and the stop string that matched."""
    matcher = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, StopMatch):
            return shown + found.text, found.stop
        shown += found
    return shown + matcher.flush(), None


@given(
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(ALPHABET, max_size=5), max_size=8),
    st.booleans(),
)
def test_cuts_make_no_difference(stops: list[str], pieces: list[str], include: bool) -> None:
    whole = "".join(pieces)
    shown, stop = run(stops, pieces, include)
    assert (shown, stop) == run(stops, list(whole), include) == run(stops, [whole], include)
    if stop is None:
        assert shown == whole
        assert not any(candidate in whole for candidate in stops)
    else:
        assert whole.startswith(shown)
        assert shown.endswith(stop) if include else whole.startswith(shown + stop)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("a ST") == "a "
    assert matcher.push("x") == "STx"
    assert matcher.push("yS") == "y"
    assert matcher.push("TOP and more") == StopMatch("STOP", "")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["c", "bc"], ["abc"]) == ("a", "bc")


def test_the_stop_string_can_be_shown() -> None:
    assert run(["##"], ["a#", "#b"], include=True) == ("a##", "##")
