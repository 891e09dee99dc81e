"""Full blocks that steps not yet committed compute: worth waiting for, not computing twice."""

from collections.abc import Iterable

from jaxpaged.request import Sequence
from jaxpaged.scheduler.kv_manager import PrefixMatch, min_copied_tokens
from jaxpaged.scheduler.prefix_cache import Tokens, common_prefix_len


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
        start = sequence.num_published_blocks * self._block_size
        end = start + self._block_size
        if end <= min(sequence.num_scheduled_total, len(sequence.token_ids)):
            tokens = tuple(sequence.token_ids[start:end])
            self._by_parent.setdefault(sequence.chain, []).append(tokens)

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
