"""Beam search of one request: which continuations live on, and which hypotheses are kept.

A beam is a continuation that may still grow; a hypothesis is one that has ended. Each step every
beam offers its best next tokens, and all offers are ranked together by the log-probability of the
whole continuation:

    rank  0 .. beam_width - 1   ends with an end token: becomes a hypothesis, scored
                                cumulative_logprob / num_tokens ** length_penalty
    rank  beam_width ..         ends with an end token: dropped; it was never among the best
    the first beam_width that do not end: the beams of the next step

Of the hypotheses the beam_width best are kept. The search is done at max_tokens, where the
beam_width best offers end whatever their last token is; or when beam_width hypotheses are kept and
the best beam, scored at its present length, does not beat the worst of them. With a positive
length penalty a longer continuation might still have won: that stop is a heuristic, the one of
Hugging Face's `generate(num_beams=beam_width, early_stopping=False)`, and all rules here are meant
to choose as that does. With one beam they come to greedy decoding.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

# A token id, and its log-probability after the tokens of the beam that offers it.
type Candidate = tuple[int, float]
# The negated log-probability of a continuation, its parent, its last token: the lowest is best.
type _Offer = tuple[float, int, int]


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation that may still grow.

    Attributes:
      parent: the index of the beam that it continued, among those of the step before.
      cumulative_logprob: of all `token_ids`.
    """

    parent: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that has ended.

    Attributes:
      token_ids: the end token is one of them.
      ended_by: the end token; None where `max_tokens` ended it.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    ended_by: int | None


class BeamSearch:
    """The search of one request, from one empty beam to at most `beam_width` hypotheses.

    Attributes:
      beams: those that grow in the next step, best first; none when the search is done.
    """

    def __init__(
        self,
        *,
        beam_width: int,
        length_penalty: float,
        max_tokens: int,
        end_token_ids: Collection[int],
    ):
        self._beam_width = beam_width
        self._length_penalty = length_penalty
        self._max_tokens = max_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._hypotheses: list[Hypothesis] = []
        self.beams: tuple[Beam, ...] = (Beam(parent=0, token_ids=(), cumulative_logprob=0.0),)

    @property
    def num_candidates(self) -> int:
        """How many candidates of each beam decide; more change nothing.

        The next beams are at most `beam_width` tokens of one beam that are no end tokens, and its
        end tokens may all be better than those.
        """
        return self._beam_width + len(self._end_token_ids)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> tuple[Beam, ...]:
        """Grows every beam by one token, or ends it; returns the new `beams`.

        Equal log-probabilities go to the lower parent, then to the lower token id.

        Args:
          candidates: for each of `beams`, in their order, its `num_candidates` best next tokens,
            or its whole vocabulary where that is smaller; in any order. A token that cannot be
            said (log-probability -inf) is no candidate, so there may be fewer beams than
            `beam_width`.
        """
        assert self.beams, "the search is done"
        offers = sorted(self._offers(candidates))
        is_last = len(self.beams[0].token_ids) + 1 == self._max_tokens
        for offer in offers[: self._beam_width]:
            if is_last or self._ends(offer):
                self._keep(self._grown(offer))
        growing = [offer for offer in offers if not self._ends(offer)][: self._beam_width]
        beams = tuple(self._grown(offer) for offer in growing)
        is_done = is_last or not beams or self._cannot_improve(beams[0])
        self.beams = () if is_done else beams
        return self.beams

    def best(self) -> tuple[Hypothesis, ...]:
        """The hypotheses kept so far, the highest score first."""
        return tuple(self._hypotheses)

    def _offers(self, candidates: Sequence[Sequence[Candidate]]) -> Iterator[_Offer]:
        for parent, (beam, own) in enumerate(zip(self.beams, candidates, strict=True)):
            for token_id, logprob in own:
                if logprob > -inf:
                    yield -(beam.cumulative_logprob + logprob), parent, token_id

    def _ends(self, offer: _Offer) -> bool:
        _, _, token_id = offer
        return token_id in self._end_token_ids

    def _grown(self, offer: _Offer) -> Beam:
        cost, parent, token_id = offer
        return Beam(parent, (*self.beams[parent].token_ids, token_id), -cost)

    def _score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / len(beam.token_ids) ** self._length_penalty

    def _keep(self, beam: Beam) -> None:
        """Makes a hypothesis of it, if it is among the best; of equal scores the first is."""
        last = beam.token_ids[-1]
        ended_by = last if last in self._end_token_ids else None
        self._hypotheses.append(
            Hypothesis(beam.token_ids, beam.cumulative_logprob, self._score(beam), ended_by)
        )
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self._beam_width :]

    def _cannot_improve(self, best_beam: Beam) -> bool:
        if len(self._hypotheses) < self._beam_width:
            return False
        return self._score(best_beam) <= self._hypotheses[-1].score
