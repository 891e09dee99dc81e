"""Which published block holds which tokens after which prefix.

A key is exact: (identity of the parent's published block, the tokens). No digest stands in for
the tokens, so two prefixes cannot collide. The root's identity carries the tagged extras (a salt)
and an epoch, so that keys made before a reset are never reachable after it.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

type Identity = int | tuple[str, int, str]
type Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: Identity
    tokens: Tokens
    identity: Identity


class PrefixCache:
    """Maps keys to block ids. It holds no references: whoever evicts a block calls `forget`."""

    def __init__(self):
        self._blocks: dict[tuple[Identity, Tokens], int] = {}
        self._entries: dict[int, _Entry] = {}
        # The children of one parent in order, so that the longest common prefix is a neighbour.
        self._children: dict[Identity, list[Tokens]] = {}
        self._epoch = 0
        self._next_identity = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def root(self, salt: str) -> Identity:
        return ("salt", self._epoch, salt)

    def lookup(self, parent: Identity, tokens: Tokens) -> tuple[int, Identity] | None:
        """The block holding exactly `tokens` after `parent`, and the identity of its content."""
        block = self._blocks.get((parent, tokens))
        return None if block is None else (block, self._entries[block].identity)

    def lookup_partial(self, parent: Identity, tokens: Tokens) -> tuple[int, int]:
        """The block after `parent` that shares the most leading tokens with `tokens`.

        Returns:
          (block id, number of shared tokens); (0, 0) when none shares any.
        """
        children = self._children.get(parent)
        if not children:
            return 0, 0
        best, best_common = None, 0
        at = bisect_left(children, tokens)
        for candidate in children[max(0, at - 1) : at + 1]:
            common = common_prefix_len(candidate, tokens)
            if common > best_common:
                best, best_common = candidate, common
        return (0, 0) if best is None else (self._blocks[parent, best], best_common)

    def publish(self, block: int, parent: Identity, tokens: Tokens) -> Identity:
        """Gives the content of `block` a key, unless another block has that key already.

        Returns:
          The identity of the content, the same for every block that holds it.
        """
        entry = self._entries.get(block)
        if entry is not None:
            # A sequence that shares the block was first. Its chain may have led through another
            # block with the first one's content, evicted since: the identities then differ.
            assert entry.tokens == tokens, f"block {block} was published with other tokens"
            return entry.identity
        known = self.lookup(parent, tokens)
        if known is not None:
            return known[1]
        self._next_identity += 1
        self._blocks[parent, tokens] = block
        self._entries[block] = _Entry(parent, tokens, self._next_identity)
        insort(self._children.setdefault(parent, []), tokens)
        return self._next_identity

    def forget(self, block: int) -> None:
        """Removes the key of `block`; its children can no longer be reached, and age out."""
        entry = self._entries.pop(block)
        del self._blocks[entry.parent, entry.tokens]
        children = self._children[entry.parent]
        del children[bisect_left(children, entry.tokens)]
        if not children:
            del self._children[entry.parent]

    def clear(self) -> None:
        self._blocks.clear()
        self._entries.clear()
        self._children.clear()
        self._epoch += 1

    def published_blocks(self) -> set[int]:
        return set(self._entries)

    def check_integrity(self) -> None:
        """Raises AssertionError unless keys, blocks and children tell the same."""
        keys = {(e.parent, e.tokens): block for block, e in self._entries.items()}
        assert keys == self._blocks, "keys and blocks differ"
        children = {(parent, t) for parent, group in self._children.items() for t in group}
        assert children == set(keys), "children and keys differ"
        assert all(group == sorted(group) for group in self._children.values())


def common_prefix_len(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that `a` and `b` share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
