"""Prints answers as they stream in, and a picture of the block pool."""

import sys
from collections.abc import Iterable, Sequence

from jaxpaged.outputs import BlockState, Delta, EngineStats

_BLOCKS_A_LINE = 64
_MAX_LINES = 8


def print_deltas(deltas: Iterable[Delta], num_sequences: int) -> None:
    """One sequence is printed while it grows; several ones each at its end."""
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        if num_sequences == 1:
            print(delta.text, end="", flush=True)
            continue
        texts.setdefault(delta.index, []).append(delta.text)
        if delta.finish_reason is not None:
            print(f"[{delta.index}] {''.join(texts[delta.index])}", flush=True)
    if num_sequences == 1:
        print(flush=True)


def print_stats(stats: EngineStats, blocks: Sequence[BlockState]) -> None:
    rows = (
        ("requests", f"{stats.running_requests} running, {stats.queued_requests} queued"),
        (
            "blocks",
            f"{stats.used_blocks} of {stats.total_blocks} in use, {stats.cached_free_blocks} free "
            f"ones cached ({stats.block_size} tokens each)",
        ),
        ("waste", f"{stats.waste:.1%} of the slots in use"),
        (
            "tokens",
            f"{stats.prompt_tokens} prompt ({stats.cached_prompt_tokens} of them from the cache), "
            f"{stats.completion_tokens} completion",
        ),
        (
            "steps",
            f"{stats.steps}, {stats.preemptions} preemptions, "
            f"{stats.compiles_after_warmup} compiles after warm-up",
        ),
    )
    for name, value in rows:
        print(f"{name:9} {value}")
    picture = pool_picture(blocks, stats.block_size)
    print("\n".join([*picture, "█ full  ▒ partly filled  ░ free, cached  · free"]))
    sys.stdout.flush()


def pool_picture(blocks: Sequence[BlockState], block_size: int) -> list[str]:
    """A character per block; free blocks at the end are only counted."""
    characters = "".join(_character(block, block_size) for block in blocks)
    num_shown = len(characters.rstrip("·"))
    num_lines = min(_MAX_LINES, -(-num_shown // _BLOCKS_A_LINE) or 1)
    num_shown = min(len(blocks), num_lines * _BLOCKS_A_LINE)
    lines = [
        characters[start : start + _BLOCKS_A_LINE] for start in range(0, num_shown, _BLOCKS_A_LINE)
    ]
    if num_shown < len(blocks):
        lines.append(f"... and {len(blocks) - num_shown} more blocks")
    return lines


def _character(block: BlockState, block_size: int) -> str:
    if block.references > 0:
        return "█" if block.used_slots == block_size else "▒"
    return "░" if block.cached else "·"
