"""Block tables: a sequence's blocks, shared through the prefix cache and through forks.

Who owns which slots of a running sequence's table (block_size 4, 9 tokens known):

    block_table   [ b0 ]      [ b1 ]      [ b2 ]
    slots          0 1 2 3     4 5 6 7     8 . . .
                   published   full        partly filled
                   shared, read only       written by this sequence alone

A block with more than one table on it is never written: the writer gets a copy first.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpaged.request import Sequence, SequenceStatus
from jaxpaged.scheduler.block_pool import BlockPool
from jaxpaged.scheduler.prefix_cache import Identity, PrefixCache


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a sequence, nothing acquired yet.

    Attributes:
      blocks: published blocks to share, in order.
      chain: identity of the content up to their end.
      copy_source: block whose first `num_copied` tokens continue the prefix, or the null block.
    """

    blocks: list[int]
    chain: Identity
    copy_source: int = 0
    num_copied: int = 0


class KVManager:
    """Gives blocks to sequences and takes them back. `None` and False mean: no block is free."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()
        self._enable_prefix_caching = enable_prefix_caching
        # Planned copies read these blocks in a step not yet committed; each holds a reference.
        self._copy_sources: Counter[int] = Counter()

    # --- admission -----------------------------------------------------------------------------

    def reads_cache(self, sequence: Sequence) -> bool:
        """Not where log-probabilities of the prompt are wanted: the cache has none."""
        params = sequence.request.source.params
        return self._enable_prefix_caching and params.use_prefix_cache and not sequence.needs_scores

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Finds the longest cached prefix; at least one token is left to compute."""
        parent = self.cache.root(sequence.request.source.params.cache_salt)
        blocks: list[int] = []
        if not self.reads_cache(sequence):
            return PrefixMatch(blocks, parent)
        size, limit, tokens = self.block_size, len(sequence.token_ids) - 1, sequence.token_ids
        start = 0
        while start + size <= limit:
            hit = self.cache.lookup(parent, tuple(tokens[start : start + size]))
            if hit is None:
                break
            blocks.append(hit[0])
            parent = hit[1]
            start += size
        rest = tuple(tokens[start : min(limit, start + size)])
        source, num_shared = self.cache.lookup_partial(parent, rest)
        if num_shared < min_copied_tokens(size):
            return PrefixMatch(blocks, parent)
        return PrefixMatch(blocks, parent, source, num_shared)

    def is_cached(self, match: PrefixMatch) -> bool:
        """Whether all of a match found since the last commit is still there."""
        cache = self.cache
        has_source = not match.num_copied or match.copy_source in cache
        return has_source and all(block in cache for block in match.blocks)

    def num_free_taken(self, match: PrefixMatch) -> int:
        """Free blocks that sharing (and copying from) the match's blocks takes out of the pool."""
        references = self.pool.references
        taken = sum(references[block] == 0 for block in match.blocks)
        return taken + (match.num_copied > 0 and references[match.copy_source] == 0)

    def share(self, sequence: Sequence, match: PrefixMatch) -> tuple[int, int] | None:
        """Starts the sequence's table with the match; the caller checked that blocks suffice.

        Returns:
          The (source, destination) copy that the next step must make, if any.
        """
        assert not sequence.block_table
        for block in match.blocks:
            self.pool.acquire(block)
        sequence.block_table = list(match.blocks)
        sequence.num_published_blocks = len(match.blocks)
        sequence.chain = match.chain
        if not match.num_copied:
            return None
        self._pin_copy_source(match.copy_source)
        destination = self._allocate()
        assert destination is not None
        sequence.block_table.append(destination)
        return match.copy_source, destination

    # --- growth --------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` tokens: all the blocks that takes, or none."""
        table = sequence.block_table
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            block = self._allocate()
            assert block is not None
            table.append(block)
        return True

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds the block."""
        return self.pool.references[block] - self._copy_sources[block] > 1

    def copy_on_write(self, sequence: Sequence, block_idx: int) -> tuple[int, int] | None:
        """Replaces a shared block of the table by a copy of its own.

        Returns:
          The (source, destination) copy that the next step must make; None: no block is free.
        """
        destination = self._allocate()
        if destination is None:
            return None
        source = sequence.block_table[block_idx]
        # The table's reference turns into the planned copy's.
        self._copy_sources[source] += 1
        sequence.block_table[block_idx] = destination
        return source, destination

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child the parent's table, every block shared."""
        for block in parent.block_table:
            self.pool.acquire(block)
        child.block_table = list(parent.block_table)
        child.num_published_blocks = parent.num_published_blocks
        child.chain = parent.chain

    # --- after a step --------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Gives keys to the blocks that became full; their KV is in the pool."""
        if not self._enable_prefix_caching:
            return
        size = self.block_size
        while (sequence.num_published_blocks + 1) * size <= sequence.num_computed_tokens:
            at = sequence.num_published_blocks
            assert sequence.chain is not None
            tokens = tuple(sequence.token_ids[at * size : (at + 1) * size])
            sequence.chain = self.cache.publish(sequence.block_table[at], sequence.chain, tokens)
            sequence.num_published_blocks += 1

    def unpublish(self, sequence: Sequence) -> None:
        """Takes back the keys of the blocks that the sequence did not find in the cache."""
        for block in sequence.block_table[sequence.num_cached_tokens // self.block_size :]:
            if block in self.cache:
                self.cache.forget(block)

    def finish_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """The step that made these copies was committed: their sources are free to go."""
        for source, _ in copies:
            self._copy_sources[source] -= 1
            if not self._copy_sources[source]:
                del self._copy_sources[source]
            self._release(source)

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's blocks back, tail first, so that prefixes stay cached longest."""
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        sequence.num_published_blocks = 0
        sequence.chain = None

    def reset_cache(self) -> int:
        """Forgets all keys; blocks in use stay with their sequences.

        Returns:
          The number of free blocks that were forgotten.
        """
        unused = self.pool.cached_free_blocks()
        self.cache.clear()
        for block in unused:
            self.pool.forget_cached(block)
        return len(unused)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless tables, references, keys and free blocks agree."""
        references = Counter(self._copy_sources)
        for sequence in sequences:
            references.update(sequence.block_table)
            if sequence.status is not SequenceStatus.RUNNING:
                assert not sequence.block_table, "only a running sequence holds blocks"
                continue
            needed = -(-sequence.num_scheduled_total // self.block_size)
            assert len(sequence.block_table) >= needed, "a scheduled token has no slot"
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            written = sequence.block_table[sequence.num_computed_tokens // self.block_size :]
            assert not any(block in self.cache for block in written), "a published block is written"
        assert 0 not in references, "the null block is in a table"
        self.cache.check_integrity()
        self.pool.check_integrity(dict(references), self.cache.published_blocks())

    # --- inside --------------------------------------------------------------------------------

    def _allocate(self) -> int | None:
        taken = self.pool.allocate()
        if taken is None:
            return None
        block, evicted = taken
        if evicted:
            self.cache.forget(block)
        return block

    def _pin_copy_source(self, block: int) -> None:
        self.pool.acquire(block)
        self._copy_sources[block] += 1

    def _release(self, block: int) -> None:
        self.pool.release(block, cached=block in self.cache)


def min_copied_tokens(block_size: int) -> int:
    """Fewer shared tokens than this are cheaper computed again than copied or waited for."""
    return max(1, block_size // 4)
