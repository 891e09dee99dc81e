"""Pictures of the block pool, taken when somebody asks."""

from jaxpaged.outputs import BlockState
from jaxpaged.scheduler.roster import Roster


def used_slots(roster: Roster, block_size: int) -> dict[int, int]:
    """Slots that hold a token, by block in use; a shared block counts once."""
    slots: dict[int, int] = {}
    for sequence in roster.running:
        left = sequence.num_scheduled_total
        for block in sequence.block_table:
            slots[block] = max(slots.get(block, 0), min(block_size, max(0, left)))
            left -= block_size
    return slots


def block_states(roster: Roster, block_size: int) -> list[BlockState]:
    """Every block, by id; the null block first."""
    slots, references = used_slots(roster, block_size), roster.kv.pool.references
    published = roster.kv.cache.published_blocks()
    return [
        BlockState(
            references=count,
            used_slots=slots.get(block, block_size if block in published else 0),
            cached=block in published,
        )
        for block, count in enumerate(references)
    ]
