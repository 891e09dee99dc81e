"""Beam search against Hugging Face's, a NumPy reference, and every continuation that there is.

All on a toy model: a table of the next token's logits after the last two tokens.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.scheduler.beam_search import BeamSearch

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "toy_beams.json").read_text())
TABLE = np.array(GOLDEN["logits"])
PENALTIES = [0.0, 0.5, 1.0, 2.0, -1.0]
OPTIONS = ["beam_width", "length_penalty", "max_tokens", "end_token_ids"]


def logprobs_after(table, tokens):
    logits = table[tokens[-2], tokens[-1]]
    return logits - np.log(np.exp(logits).sum())


def random_table(seed, vocab_size=7):
    return np.random.default_rng(seed).normal(0, 1.5, [vocab_size] * 3)


def run(table, prompt, *, num_candidates=None, **options):
    """What `BeamSearch` answers to the table's model."""
    search = BeamSearch(**options)
    num_candidates = num_candidates or search.num_candidates
    while search.beams:
        candidates = []
        for beam in search.beams:
            logprobs = logprobs_after(table, [*prompt, *beam.token_ids])
            best = np.argsort(-logprobs, kind="stable")[:num_candidates]
            candidates.append([(int(i), float(logprobs[i])) for i in best])
        before, beams = search.beams, search.advance(candidates)
        assert beams == search.beams
        assert all(b.token_ids[:-1] == before[b.parent].token_ids for b in beams)
    return search.best()


def reference(table, prompt, *, beam_width, length_penalty, max_tokens, end_token_ids, fault=""):
    """The same search on whole rows of log-probabilities: (score, token ids), best first.

    `fault` leaves out one of its rules.
    """
    beams, totals, done = np.zeros((1, 0), int), np.zeros(1), []
    for length in range(1, max_tokens + 1):
        rows = np.stack([logprobs_after(table, [*prompt, *beam]) for beam in beams])
        grid = totals[:, None] + rows
        order = np.argsort(-grid, axis=None, kind="stable")
        parents, tokens = np.unravel_index(order, grid.shape)
        offers = np.column_stack([beams[parents], tokens])
        totals = grid.ravel()[order]
        ends = np.isin(tokens, list(end_token_ids))
        divisor = {"prompt counted": length + len(prompt), "end not counted": max(length - 1, 1)}
        weight = float(divisor.get(fault, length)) ** length_penalty
        scores = totals if fault == "no length penalty" else totals / weight
        is_last = length == max_tokens
        num_watched = len(offers) if fault == "late ends kept" else beam_width
        for idx in range(min(num_watched, len(offers))):
            if ends[idx] or (is_last and idx < beam_width):
                done.append((scores[idx], tuple(offers[idx].tolist())))
        done = sorted(done, key=lambda pair: -pair[0])[:beam_width]
        live = np.flatnonzero(~ends)[:beam_width]
        full = len(done) == beam_width and fault != "no early end"
        if is_last or (full and scores[live[0]] <= done[-1][0]):
            break
        if fault == "first end is enough" and len(done) == beam_width:
            break
        beams, totals = offers[live], totals[live]
    return done


def tokens_of(hypotheses):
    return [hypothesis.token_ids for hypothesis in hypotheses]


def options_of(case):
    return {name: case[name] for name in OPTIONS}


def golden_tokens(case):
    return [tuple(hypothesis["token_ids"]) for hypothesis in case["hypotheses"]]


def test_equals_hugging_face():
    for case in GOLDEN["cases"]:
        found = run(TABLE, case["prompt_token_ids"], **options_of(case))
        assert tokens_of(found) == golden_tokens(case), case
        expected = [hypothesis["score"] for hypothesis in case["hypotheses"]]
        np.testing.assert_allclose([h.score for h in found], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "fault",
    [
        "no length penalty",
        "prompt counted",
        "end not counted",
        "late ends kept",
        "no early end",
        "first end is enough",
    ],
)
def test_the_goldens_tell_every_rule(fault):
    def differs(case, **options):
        answer = reference(TABLE, case["prompt_token_ids"], **options_of(case), **options)
        return [tokens for _, tokens in answer] != golden_tokens(case)

    assert not any(differs(case) for case in GOLDEN["cases"])
    assert any(differs(case, fault=fault) for case in GOLDEN["cases"])


def test_the_goldens_tell_a_missing_candidate():
    """The beam_width best tokens of a beam are not enough: end tokens are among them."""
    assert any(
        tokens_of(
            run(
                TABLE,
                case["prompt_token_ids"],
                num_candidates=case["beam_width"],
                **options_of(case),
            )
        )
        != golden_tokens(case)
        for case in GOLDEN["cases"]
    )


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("beam_width", [2, 3, 4, 5])
def test_equals_the_reference(beam_width, length_penalty):
    num_early = 0
    for seed, ends in product(range(8), [(), (3,), (0, 5), (1, 2, 6)]):
        table = random_table(seed)
        options = {
            "beam_width": beam_width,
            "length_penalty": length_penalty,
            "max_tokens": 1 + seed,
            "end_token_ids": ends,
        }
        found = run(table, (seed % 7, 1), **options)
        expected = reference(table, (seed % 7, 1), **options)
        assert tokens_of(found) == [tokens for _, tokens in expected]
        np.testing.assert_allclose([h.score for h in found], [score for score, _ in expected])
        assert found == run(table, (seed % 7, 1), num_candidates=7, **options)
        num_early += sum(len(h.token_ids) < options["max_tokens"] for h in found)
    assert num_early


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("ends", [(), (2,), (0, 3)])
def test_wide_enough_finds_the_best_of_all(ends, length_penalty):
    """As many beams as there are continuations: nothing is ever pruned, nothing ends early."""
    table, prompt, max_tokens = random_table(5, vocab_size=4), (0, 1), 4
    everything = []
    for length in range(1, max_tokens + 1):
        for tokens in product(range(4), repeat=length):
            inner_end = any(token in ends for token in tokens[:-1])
            if not inner_end and (length == max_tokens or tokens[-1] in ends):
                total = sum(
                    logprobs_after(table, [*prompt, *tokens[:idx]])[token]
                    for idx, token in enumerate(tokens)
                )
                everything.append((total / length**length_penalty, tokens))
    everything.sort(reverse=True)
    options = {
        "length_penalty": length_penalty,
        "max_tokens": max_tokens,
        "end_token_ids": ends,
    }
    found = run(table, prompt, beam_width=len(everything), **options)
    # As sets: two orders of the same transitions have one score.
    assert set(tokens_of(found)) == {tokens for _, tokens in everything}
    np.testing.assert_allclose([h.score for h in found], [score for score, _ in everything])
    narrow = run(table, prompt, beam_width=2, **options)
    assert narrow[0].score <= found[0].score


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("ends", [(), (3,), (0, 5)])
def test_one_beam_is_greedy(ends, length_penalty):
    for seed in range(6):
        table, tokens, total = random_table(seed), [2, 4], 0.0
        while len(tokens) < 10 and (len(tokens) == 2 or tokens[-1] not in ends):
            logprobs = logprobs_after(table, tokens)
            total += logprobs.max()
            tokens.append(int(logprobs.argmax()))
        (found,) = run(
            table,
            (2, 4),
            beam_width=1,
            length_penalty=length_penalty,
            max_tokens=8,
            end_token_ids=ends,
        )
        assert found.token_ids == tuple(tokens[2:])
        assert found.cumulative_logprob == pytest.approx(total)
        assert found.score == pytest.approx(total / len(found.token_ids) ** length_penalty)
        assert found.ended_by == (tokens[-1] if tokens[-1] in ends else None)


def make_search(**options):
    defaults = {"beam_width": 2, "length_penalty": 1.0, "max_tokens": 4, "end_token_ids": [9]}
    return BeamSearch(**(defaults | options))


def grown(beams):
    return [(beam.parent, beam.token_ids, beam.cumulative_logprob) for beam in beams]


def test_by_hand():
    search = make_search()
    beams = search.advance([[(5, -1.0), (9, -2.0), (6, -2.5), (7, -3.0)]])
    assert grown(beams) == [(0, (5,), -1.0), (0, (6,), -2.5)]
    assert [(h.token_ids, h.score, h.ended_by) for h in search.best()] == [((9,), -2.0, 9)]
    # The end token of rank 2 comes too late; the one of rank 1 counts itself in its length.
    beams = search.advance([[(7, -0.5), (9, -2.0), (8, -4.0)], [(5, -0.25), (9, -0.5), (7, -9.0)]])
    assert grown(beams) == [(0, (5, 7), -1.5), (1, (6, 5), -2.75)]
    assert tokens_of(search.best()) == [(9,)]
    beams = search.advance([[(9, -0.5), (5, -3.0), (6, -3.5)], [(9, -0.25), (5, -8.0), (6, -8.5)]])
    # -4.5 / 3 does not beat the worse hypothesis, -3.0 / 3: done before max_tokens.
    assert beams == ()
    assert [(h.token_ids, h.score) for h in search.best()] == [
        ((5, 7, 9), -2.0 / 3),
        ((6, 5, 9), -1.0),
    ]
    with pytest.raises(AssertionError, match="done"):
        search.advance([])


def test_equal_log_probabilities_go_to_the_lower_beam_then_the_lower_token():
    search = make_search(beam_width=3, end_token_ids=[])
    beams = search.advance([[(8, -1.0), (2, -1.0), (5, -1.0), (1, -1.5)]])
    assert [beam.token_ids for beam in beams] == [(2,), (5,), (8,)]
    tied = [(4, -1.0), (3, -1.0)]
    beams = search.advance([tied, tied, tied])
    assert [(beam.parent, beam.token_ids[-1]) for beam in beams] == [(0, 3), (0, 4), (1, 3)]


def test_equal_scores_keep_the_one_that_ended_first():
    search = make_search(length_penalty=0.0)
    search.advance([[(9, -1.0), (5, -1.0), (6, -1.0)]])
    assert tokens_of(search.best()) == []  # 5 and 6 come before 9
    search = make_search(length_penalty=0.0, max_tokens=2, end_token_ids=[1])
    search.advance([[(1, -2.0), (5, -1.0), (6, -3.0)]])
    search.advance([[(1, -1.0), (5, -1.0), (6, -1.5)], [(1, -5.0), (5, -6.0), (6, -7.0)]])
    assert tokens_of(search.best()) == [(1,), (5, 1)]


def test_at_max_tokens_the_best_end_whatever_they_say():
    search = make_search(max_tokens=1)
    assert search.advance([[(5, -1.0), (9, -1.5), (6, -2.0)]]) == ()
    assert [(h.token_ids, h.ended_by) for h in search.best()] == [((5,), None), ((9,), 9)]


def test_fewer_tokens_than_beams():
    """Each hypothesis once, and no more than can be said; the beams grow to their number."""
    table = random_table(3, vocab_size=2)
    options = {"length_penalty": 1.0, "end_token_ids": ()}
    assert len(run(table, (0, 1), beam_width=5, max_tokens=1, **options)) == 2
    found = run(table, (0, 1), beam_width=5, max_tokens=3, **options)
    assert len(set(tokens_of(found))) == 5
    only_ends = run(
        table, (0, 1), beam_width=5, max_tokens=3, length_penalty=1.0, end_token_ids={0, 1}
    )
    assert sorted(tokens_of(only_ends)) == [(0,), (1,)]


def test_what_cannot_be_said_is_never_a_beam():
    search = make_search(beam_width=3)
    beams = search.advance([[(5, -0.5), (9, -1.0), (6, -np.inf), (7, -np.inf)]])
    assert grown(beams) == [(0, (5,), -0.5)]
    assert search.advance([[(6, -np.inf), (7, -np.inf)]]) == ()
    assert tokens_of(search.best()) == [(9,)]


def test_candidates_of_every_beam_are_demanded():
    search = make_search()
    search.advance([[(5, -1.0), (6, -2.0), (7, -3.0)]])
    with pytest.raises(ValueError, match="shorter"):
        search.advance([[(5, -1.0), (6, -2.0), (7, -3.0)]])


@pytest.mark.parametrize(
    ("beam_width", "ends", "expected"), [(1, [], 1), (4, [], 4), (4, [3, 4], 6), (4, [3, 3], 5)]
)
def test_num_candidates(beam_width, ends, expected):
    assert make_search(beam_width=beam_width, end_token_ids=ends).num_candidates == expected
