"""Prints answers as they stream in, and a picture of the block pool."""

import sys
from collections.abc import Iterable, Sequence

from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.outputs import Accepted, BlockState, Delta, EngineStats, PromptLogprobs, StreamEvent
from jaxpaged.sampling_params import sequence_seed

_BLOCKS_A_LINE = 64
_MAX_LINES = 8


def print_events(events: Iterable[StreamEvent], num_sequences: int) -> None:
    """The text, then the log-probabilities where the request asked for them.

    One sequence is printed while it grows; several ones each at its end, with its seed.
    """
    seed = 0
    texts: dict[int, list[str]] = {}
    prompt_logprobs: list[PositionLogprobs] = []
    logprobs: dict[int, list[PositionLogprobs]] = {}
    for event in events:
        match event:
            case Accepted():
                seed = event.seed
            case PromptLogprobs():
                prompt_logprobs.extend(event.logprobs)
            case Delta(index=index, text=text):
                logprobs.setdefault(index, []).extend(event.logprobs or ())
                texts.setdefault(index, []).append(text)
                if num_sequences == 1:
                    print(text, end="", flush=True)
                elif event.finish_reason is not None:
                    of_sequence = f"[{index}] seed {sequence_seed(seed, index)}"
                    print(f"{of_sequence}: {''.join(texts[index])}", flush=True)
    if num_sequences == 1:
        print(flush=True)
    _print_logprobs("prompt", prompt_logprobs)
    for index in sorted(logprobs):
        _print_logprobs("output" if num_sequences == 1 else f"[{index}]", logprobs[index])


def _print_logprobs(title: str, positions: Sequence[PositionLogprobs]) -> None:
    if positions:
        print("\n".join(["", f"{title} log-probabilities", *logprob_table(positions)]), flush=True)


def logprob_table(positions: Sequence[PositionLogprobs]) -> list[str]:
    """A line for each position: its token, and the best ones that it is not."""
    rows: list[tuple[str, ...]] = [("position", "token", "logprob", "rank", "best alternatives")]
    for number, position in enumerate(positions):
        chosen = position.chosen
        others = [
            f"{_token_text(entry)} {entry.logprob:.3f}" for entry in position.top if entry != chosen
        ]
        told = (
            ("-", "-", "-")
            if chosen is None
            else (_token_text(chosen), f"{chosen.logprob:.3f}", str(chosen.rank))
        )
        rows.append((str(number), *told, ", ".join(others)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{row[0]:>{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]


def _token_text(entry: TokenLogprob) -> str:
    """The token as Python writes it; its bytes where they are only part of a character."""
    if not entry.token_bytes:
        return f"id {entry.token_id}"
    try:
        return repr(entry.token_bytes.decode())
    except UnicodeDecodeError:
        return repr(entry.token_bytes)


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
