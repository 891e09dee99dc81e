"""Full blocks that steps not yet committed compute: worth waiting for, not computing twice."""

from collections.abc import Iterable

from jaxpaged.request import Sequence
from jaxpaged.scheduler.kv_manager import PrefixMatch, min_copied_tokens
from jaxpaged.scheduler.prefix_cache import Identity, Tokens, common_prefix_len


class PendingBlocks:
    """For each running sequence, the first block that its next commit will publish.

    Only the first: whoever waits for it looks again after that commit.
    """

    def __init__(self, block_size: int, running: Iterable[Sequence]):
        self._block_size = block_size
        self._by_parent: dict[object, list[Tokens]] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Notes what the sequence computes, once its chunk of this step is booked."""
        num_tokens = min(sequence.num_scheduled_total, len(sequence.token_ids))
        self._add(sequence, sequence.chain, sequence.num_published_blocks, num_tokens)

    def expect(self, sequence: Sequence, chain: Identity | None, num_blocks: int) -> None:
        """Notes what the sequence computes if this step takes all its tokens.

        Args:
          chain: identity of its content up to the end of its first `num_blocks` blocks, which are
            published.
        """
        self._add(sequence, chain, num_blocks, len(sequence.token_ids))

    def _add(
        self, sequence: Sequence, chain: Identity | None, num_blocks: int, num_tokens: int
    ) -> None:
        start = num_blocks * self._block_size
        end = start + self._block_size
        if end <= num_tokens:
            tokens = tuple(sequence.token_ids[start:end])
            self._by_parent.setdefault(chain, []).append(tokens)

    def continue_better(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether one of them shares more tokens with a cache reader than its match does."""
        candidates = self._by_parent.get(match.chain)
        if not candidates:
            return False
        start = len(match.blocks) * self._block_size
        end = min(start + self._block_size, len(sequence.token_ids) - 1)
        wanted = tuple(sequence.token_ids[start:end])
        gain = max(common_prefix_len(wanted, tokens) for tokens in candidates) - match.num_copied
        return gain >= min_copied_tokens(self._block_size)
