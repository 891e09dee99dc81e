"""Host side of the KV pool: which block is free, which is in use, and by how many."""

from collections import OrderedDict

NULL_BLOCK = 0


class BlockPool:
    """Ids and references of `num_blocks` blocks, 1 to num_blocks; every operation is O(1).

    A block is in use (references > 0), free and empty, or free and cached: its content still has a
    prefix key. Empty blocks are handed out first, then cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"{num_blocks=} must be at least 1")
        self.num_blocks = num_blocks
        self.references = [0] * (num_blocks + 1)  # by block id; the null block's stays 0
        # Blocks from here up were never used: the pool needs no list of them at start.
        self._first_unused = 1
        self._empty: list[int] = []
        self._cached_free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return self.num_blocks + 1 - self._first_unused + len(self._empty) + len(self._cached_free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached_free(self) -> int:
        return len(self._cached_free)

    def allocate(self) -> tuple[int, bool] | None:
        """Takes a free block with one reference.

        Returns:
          (block id, whether its cached content must be forgotten), or None when no block is free.
        """
        evicted = False
        if self._empty:
            block = self._empty.pop()
        elif self._first_unused <= self.num_blocks:
            block = self._first_unused
            self._first_unused += 1
        elif self._cached_free:
            block, _ = self._cached_free.popitem(last=False)
            evicted = True
        else:
            return None
        self.references[block] = 1
        return block, evicted

    def acquire(self, block: int) -> None:
        """Adds a reference to a block that is in use, or cached and free."""
        if self.references[block] == 0:
            del self._cached_free[block]
        self.references[block] += 1

    def release(self, block: int, *, cached: bool) -> None:
        """Drops a reference; the last one frees the block, `cached` if its content has a key."""
        left = self.references[block] - 1
        assert left >= 0, f"block {block} was freed twice"
        self.references[block] = left
        if left == 0:
            if cached:
                self._cached_free[block] = None
            else:
                self._empty.append(block)

    def forget_cached(self, block: int) -> None:
        """The content of `block` lost its key: if it is free, it is empty from now on."""
        if self.references[block] == 0:
            del self._cached_free[block]
            self._empty.append(block)

    def cached_free_blocks(self) -> list[int]:
        return list(self._cached_free)

    def check_integrity(self, references: dict[int, int], cached: set[int]) -> None:
        """Raises AssertionError unless every block is in exactly one state.

        Args:
          references: the true count of every block in use, by block id.
          cached: blocks whose content has a key.
        """
        assert self.references[NULL_BLOCK] == 0, "the null block is in use"
        in_use = {block: count for block, count in enumerate(self.references) if count}
        assert in_use == references, f"counted {in_use}, held {references}"
        empty = set(self._empty)
        assert len(empty) == len(self._empty), f"twice in the free list: {sorted(self._empty)}"
        unused = set(range(self._first_unused, self.num_blocks + 1))
        states = [set(in_use), empty, set(self._cached_free), unused]
        every = set(range(1, self.num_blocks + 1))
        assert set().union(*states) == every, f"lost {every - set().union(*states)}"
        assert sum(map(len, states)) == self.num_blocks, "a block is in two states"
        assert set(self._cached_free) <= cached, "a cached free block has no key"
        assert not (empty | unused) & cached, "an empty block has a key"
