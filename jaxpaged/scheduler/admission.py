"""Waiting sequences start: cached prefix, first blocks, a row, a first chunk."""

from dataclasses import replace

from jaxpaged.config import SchedulerConfig
from jaxpaged.outputs import RequestStarted
from jaxpaged.request import Sequence
from jaxpaged.scheduler.kv_manager import PrefixMatch
from jaxpaged.scheduler.pending_blocks import PendingBlocks
from jaxpaged.scheduler.roster import Roster
from jaxpaged.scheduler.scheduled_step import ScheduledStep


def admit_waiting(config: SchedulerConfig, roster: Roster, step: ScheduledStep) -> None:
    """Lets waiting sequences start, in order, while rows, blocks and the step's tokens last."""
    kv, size = roster.kv, config.block_size
    budget = step.max_num_tokens - step.plan.num_tokens
    num_owed = _num_blocks_owed(roster, size)
    pending_blocks = PendingBlocks(size, roster.running)
    deferred, parked = [], []
    # A deferred sequence keeps its claim on a row.
    while budget and len(deferred) < roster.num_free_rows:
        sequence = roster.waiting.peek()
        if sequence is None:
            break
        if sequence.awaits_selection:
            parked.append(roster.waiting.pop())
            continue
        match = _match(roster, step, sequence)
        waits = kv.reads_cache(sequence) and pending_blocks.continue_better(sequence, match)
        if waits or sequence.num_pending_tokens:
            deferred.append(roster.waiting.pop())
            continue
        match = _fitting_match(roster, sequence, match, size, num_owed)
        if match is None:
            break
        roster.waiting.pop()
        chunk = _start(roster, step, sequence, match, size, budget)
        add_chunk(config, roster, step, sequence, chunk)
        budget -= chunk
        num_owed += _num_blocks_missing(sequence, size)
        pending_blocks.add(sequence)
    for sequence in deferred + parked:
        roster.waiting.push(sequence)


def num_tokens_wanted(
    config: SchedulerConfig, roster: Roster, step: ScheduledStep, limit: int
) -> int:
    """Tokens that the waiting sequences would compute, were there no limit; counted up to `limit`.

    An estimate: whoever waits for a block that others compute is left out, and they are taken to
    compute all their tokens.
    """
    if not (roster.num_free_rows and roster.waiting):
        return 0
    kv, size = roster.kv, config.block_size
    num_owed = _num_blocks_owed(roster, size)
    expected = PendingBlocks(size, ())
    for sequence in roster.running:
        expected.expect(sequence, sequence.chain, sequence.num_published_blocks)
    num_wanted, seen = 0, []
    while num_wanted < limit and len(seen) < roster.num_free_rows:
        sequence = roster.waiting.peek()
        if sequence is None:
            break
        seen.append(roster.waiting.pop())
        if sequence.awaits_selection or sequence.num_pending_tokens:
            continue
        match = _match(roster, step, sequence)
        if kv.reads_cache(sequence) and expected.continue_better(sequence, match):
            continue
        match = _fitting_match(roster, sequence, match, size, num_owed)
        if match is None:
            break
        expected.expect(sequence, match.chain, len(match.blocks))
        num_wanted += len(sequence.token_ids) - _num_cached(match, size)
        num_owed += -(-len(sequence.token_ids) // size) - len(match.blocks)
        num_owed += kv.num_free_taken(match)
    for sequence in seen:
        roster.waiting.push(sequence)
    return num_wanted


def add_chunk(
    config: SchedulerConfig, roster: Roster, step: ScheduledStep, sequence: Sequence, chunk: int
) -> None:
    """Books a chunk whose blocks are in the table; the prompt's last one forks the request."""
    step.add_chunk(sequence, chunk)
    request = sequence.request
    if not sequence.has_device_token or len(request.sequences) == request.source.params.n:
        return
    for _ in range(1, request.source.params.n):
        child = request.new_sequence(config.max_model_len)
        if not roster.num_free_rows:
            # It waits without blocks, and will find the prompt in the cache.
            roster.waiting.push(child)
            continue
        roster.kv.fork(sequence, child)
        child.num_computed_tokens = sequence.num_scheduled_total - chunk
        child.num_cached_tokens = sequence.num_cached_tokens
        roster.start(child)
        step.start_row(child)
        step.add_fork(child, chunk)


def _match(roster: Roster, step: ScheduledStep, sequence: Sequence) -> PrefixMatch:
    """The sequence's cached prefix; looked up once a step unless blocks of it were evicted."""
    match = step.matches.get(sequence)
    if match is None or not roster.kv.is_cached(match):
        match = step.matches[sequence] = roster.kv.match(sequence)
    return match


def _fitting_match(
    roster: Roster, sequence: Sequence, match: PrefixMatch, block_size: int, num_owed: int
) -> PrefixMatch | None:
    """The match with which all known tokens fit into the free blocks, less those owed to others.

    Without its copy if the copy's source is one block too many; None if even that does not fit.
    """
    num_needed = -(-len(sequence.token_ids) // block_size) - len(match.blocks)
    room = roster.kv.pool.num_free - num_owed - num_needed
    if room < roster.kv.num_free_taken(match):
        match = replace(match, copy_source=0, num_copied=0)
    return match if room >= roster.kv.num_free_taken(match) else None


def _start(
    roster: Roster,
    step: ScheduledStep,
    sequence: Sequence,
    match: PrefixMatch,
    block_size: int,
    budget: int,
) -> int:
    """Gives a sequence its cached prefix, a row and the blocks of a first chunk of tokens.

    Returns:
      The chunk's number of tokens.
    """
    kv, total = roster.kv, len(sequence.token_ids)
    copy = kv.share(sequence, match)
    if copy is not None:
        step.plan.copies.append(copy)
    num_cached = _num_cached(match, block_size)
    sequence.num_cached_tokens = sequence.num_computed_tokens = num_cached
    chunk = min(total - num_cached, budget)
    grown = kv.grow(sequence, num_cached + chunk)
    assert grown, "the free blocks were counted wrongly"
    request = sequence.request
    if not request.started:
        request.started = True
        num_looked_up = total if kv.reads_cache(sequence) else 0
        started = RequestStarted(request.request_id, total, num_cached, num_looked_up)
        roster.outputs.started.append(started)
    roster.start(sequence)
    step.start_row(sequence)
    return chunk


def _num_cached(match: PrefixMatch, block_size: int) -> int:
    return len(match.blocks) * block_size + match.num_copied


def _num_blocks_owed(roster: Roster, block_size: int) -> int:
    """Free blocks that prompts under way will need."""
    prefilling = [s for s in roster.running if not s.has_device_token]
    return sum(_num_blocks_missing(sequence, block_size) for sequence in prefilling)


def _num_blocks_missing(sequence: Sequence, block_size: int) -> int:
    """Blocks that the sequence's known tokens still need."""
    return -(-len(sequence.token_ids) // block_size) - len(sequence.block_table)
