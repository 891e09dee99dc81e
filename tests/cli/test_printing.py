"""What the commands print: texts with seeds, tables of log-probabilities, the pool."""

import pytest

from jaxpaged.cli.printing import pool_picture, print_events
from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.outputs import Accepted, BlockState, Delta, PromptLogprobs, StreamEvent
from jaxpaged.request import FinishReason

FIRST = PositionLogprobs(None)
BEST = TokenLogprob(5, -0.25, 1, b" is")
OTHER = TokenLogprob(9, -1.5, 2, "안".encode()[:2])  # a part of a character
CHOSEN = TokenLogprob(7, -12.0625, 812, b"")


def printed(capsys: pytest.CaptureFixture[str], events: list[StreamEvent], n: int) -> list[str]:
    print_events(events, n)
    return capsys.readouterr().out.splitlines()


def test_one_sequence_is_its_text_alone(capsys: pytest.CaptureFixture[str]):
    events: list[StreamEvent] = [
        Accepted("r", [1], seed=7),
        Delta(0, "a", [1]),
        Delta(0, "b", [2], FinishReason.EOS),
    ]
    assert printed(capsys, events, 1) == ["ab"]


def test_several_sequences_tell_their_seeds(capsys: pytest.CaptureFixture[str]):
    events: list[StreamEvent] = [
        Accepted("r", [1], seed=2**63 - 1),
        Delta(1, "b", [2], FinishReason.EOS),
        Delta(0, "a", [1]),
        Delta(0, "c", [1], FinishReason.EOS),
    ]
    assert printed(capsys, events, 2) == [f"[1] seed {-(2**63)}: b", f"[0] seed {2**63 - 1}: ac"]


def test_log_probabilities_follow_the_text_the_prompt_s_first(capsys: pytest.CaptureFixture[str]):
    events: list[StreamEvent] = [
        Accepted("r", [1, 5], seed=7),
        PromptLogprobs(0, [FIRST]),
        PromptLogprobs(1, [PositionLogprobs(BEST, [BEST, OTHER])]),
        Delta(0, "x", [7], logprobs=[PositionLogprobs(CHOSEN, [BEST, OTHER])]),
        Delta(0, "y", [9], FinishReason.EOS, logprobs=[PositionLogprobs(OTHER)]),
    ]
    assert printed(capsys, events, 1) == [
        "xy",
        "",
        "prompt log-probabilities",
        "position  token  logprob  rank  best alternatives",
        "       0  -            -     -",
        "       1  ' is'   -0.250     1  b'\\xec\\x95' -1.500",
        "",
        "output log-probabilities",
        "position  token        logprob  rank  best alternatives",
        "       0  id 7         -12.062   812  ' is' -0.250, b'\\xec\\x95' -1.500",
        "       1  b'\\xec\\x95'   -1.500     2",
    ]


def test_each_of_several_sequences_has_its_table(capsys: pytest.CaptureFixture[str]):
    events: list[StreamEvent] = [
        Delta(1, "b", [5], FinishReason.EOS, logprobs=[PositionLogprobs(BEST)]),
        Delta(0, "a", [9], FinishReason.EOS, logprobs=[PositionLogprobs(OTHER)]),
    ]
    lines = printed(capsys, events, 2)
    assert lines.index("[0] log-probabilities") < lines.index("[1] log-probabilities")
    assert lines[-1] == "       0  ' is'   -0.250     1"


def test_pool_picture_counts_the_free_end():
    full, part = BlockState(1, 16, True), BlockState(1, 3, False)
    cached, free = BlockState(0, 16, True), BlockState(0, 0, False)
    assert pool_picture([free, full, part, cached, free], 16) == ["·█▒░·"]
    picture = pool_picture([cached] * 65 + [free] * 135, 16)
    assert picture == ["░" * 64, "░" + "·" * 63, "... and 72 more blocks"]
    assert pool_picture([], 16) == []
