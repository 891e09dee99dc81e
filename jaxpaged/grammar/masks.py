"""Which tokens may follow each sequence of a step: a matcher a sequence, kept while it lives."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int32

from jaxpaged.grammar.matcher import MaskFiller, Matcher, mask_width
from jaxpaged.grammar.vocabulary import Vocabulary
from jaxpaged.request import Request
from jaxpaged.request import Sequence as GeneratedSequence

logger = logging.getLogger(__name__)


@dataclass
class _Follower:
    """A sequence's matcher, and how many of its output tokens it has accepted."""

    matcher: Matcher
    num_accepted: int = 0


class MaskMaker:
    """Follows all sequences that a grammar binds; they are forgotten when they are gone."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        # Compiled once a request, copied for each of its sequences.
        self._unused: WeakKeyDictionary[Request, Future[Matcher]] = WeakKeyDictionary()
        self._followers: WeakKeyDictionary[GeneratedSequence, _Follower] = WeakKeyDictionary()

    @cached_property
    def _filler(self) -> MaskFiller:
        return MaskFiller()  # why late: it starts threads

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, "jaxpaged-grammar")

    def start(self, request: Request) -> None:
        """Begins to compile a request's grammar beside the steps that come before it is needed."""
        source = request.source
        if source.params.grammar:
            self._unused[request] = self._compilers.submit(
                Matcher, self._vocabulary, source.params.grammar, source.end_token_ids
            )

    def masks(
        self, sequences: Sequence[GeneratedSequence]
    ) -> Int32[np.ndarray, "num_sequences mask_width"]:
        """A row for each sequence: all ones where no grammar is at work.

        Bit i of word w stands for the token id 32 * w + i.
        """
        masks = np.full((len(sequences), mask_width(self._vocabulary.vocab_size)), -1, np.int32)
        matchers = [
            self._matcher(sequence) if sequence.request.source.params.grammar else None
            for sequence in sequences
        ]
        self._filler.fill(matchers, masks)
        for sequence, matcher in zip(sequences, matchers, strict=True):
            # Its mask allows nothing, so the sequence ends with this draw.
            if matcher is not None and (error := matcher.error) is not None:
                request_id = sequence.request.request_id
                logger.warning("request %s: its grammar failed: %s", request_id, error)
        return masks

    def _matcher(self, sequence: GeneratedSequence) -> Matcher | None:
        """The sequence's matcher behind its last token; None when the sequence has ended."""
        if sequence.finish_reason is not None:
            return None  # its token was drawn for nothing
        follower = self._followers.get(sequence)
        if follower is None:
            follower = _Follower(self._unused[sequence.request].result().copy())
            self._followers[sequence] = follower
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        follower.matcher.accept(output[follower.num_accepted :])
        follower.num_accepted = len(output)
        return follower.matcher
