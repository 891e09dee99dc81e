"""Stop strings: found across pieces, held back exactly, never shown."""

import random

import pytest

from jaxpaged.text import StopChecker, StopMatch


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stops, include_stop_string=include)
    text = ""
    for piece in pieces:
        match = checker.push(piece)
        text += match.text
        if match.stop is not None:
            assert checker.finish() == ""
            return text, match.stop
    return text + checker.finish(), None


def by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_a_stop_across_pieces():
    pieces = ["ABC", "DEF", "G", "HI", "JK"]
    assert run(pieces, ["DEFGHIJ"]) == ("ABC", "DEFGHIJ")
    assert run(pieces, ["DEFGHIJ"], include=True) == ("ABCDEFGHIJ", "DEFGHIJ")


def test_what_could_become_a_stop_is_held_and_the_rest_is_not():
    checker = StopChecker(["\n\nUser:", "END"], include_stop_string=False)
    assert checker.push("hello\n") == StopMatch("hello")
    assert checker.push("\nUs") == StopMatch("")
    assert checker.push("eful E") == StopMatch("\n\nUseful ")
    assert checker.push("N") == StopMatch("")
    assert checker.push("E") == StopMatch("EN")
    assert checker.finish() == "E"
    assert checker.finish() == ""


def test_the_longest_possible_match_is_held():
    checker = StopChecker(["aab"], include_stop_string=False)
    assert checker.push("aaaa") == StopMatch("aa")
    assert checker.push("b") == StopMatch("", "aab")


def test_the_first_completed_stop_wins():
    assert run(["xABCDy"], ["CD", "ABC"]) == ("x", "ABC")
    assert run(["xABCy"], ["BC", "ABC", "C"]) == ("x", "ABC")  # at the same place: the longest
    assert run(["xDEFGHI"], ["DEFGHI", "DEF"]) == ("x", "DEF")
    assert run(["xABCD"], ["ABCDE", "BC"]) == ("xA", "BC")


def test_no_stops_hold_nothing():
    checker = StopChecker([], include_stop_string=False)
    assert checker.push("abc") == StopMatch("abc")
    assert checker.finish() == ""


@pytest.mark.parametrize("include", [False, True])
def test_pieces_never_matter(include: bool):
    rng = random.Random(0)
    num_matches = 0
    for _ in range(1500):
        stops = [
            "".join(rng.choices("ab한", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))
        ]
        text = "".join(rng.choices("ab한c", k=rng.randint(0, 12)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = by_definition(text, stops, include)
        assert run(pieces, stops, include) == expected, (pieces, stops)
        num_matches += expected[1] is not None
    assert 300 < num_matches < 1400
