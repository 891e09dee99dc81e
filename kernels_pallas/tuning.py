"""Tile sizes. They change how fast a result is made, never the result beyond rounding."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionTuning:
    """Tiles of `xla.py`.

    Attributes:
      kv_tile: KV tokens of one online-softmax update; a multiple of the block size.
      q_tile: query tokens that a prefill row works on at a time.
    """

    kv_tile: int
    q_tile: int

    def __post_init__(self):
        for name, value in (("kv_tile", self.kv_tile), ("q_tile", self.q_tile)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


def default_tuning(block_size: int) -> AttentionTuning:
    """A good middle on two CPU cores with 64-wide heads: larger q tiles only help long chunks."""
    return AttentionTuning(kv_tile=max(1, 128 // block_size) * block_size, q_tile=64)


@dataclass(frozen=True)
class HopperDecodeTuning:
    """Sizes of the Hopper decode kernel.

    Attributes:
      kv_tile: KV tokens of one softmax update; a multiple of the matrix unit's 64 rows.
      stages: KV tiles in flight a worker.
      num_workers: programs, each a loading and an attending warpgroup. As many as run at once.
    """

    kv_tile: int = 64
    stages: int = 2
    num_workers: int = 264


@dataclass(frozen=True)
class HopperPrefillTuning:
    """Sizes of the Hopper prefill kernel.

    Attributes:
      kv_tile: KV tokens of one softmax update.
      stages: KV tiles in flight.
      attenders: warpgroups that attend, 64 queries each.
      q_slots: query tiles in shared memory, the one under way included.
      num_programs: multiprocessors.
    """

    kv_tile: int = 128
    stages: int = 2
    attenders: int = 2
    q_slots: int = 2
    num_programs: int = 132

    @property
    def q_tile(self) -> int:
        return 64 * self.attenders


@dataclass(frozen=True)
class HopperTuning:
    """Sizes of both Hopper kernels."""

    decode: HopperDecodeTuning
    prefill: HopperPrefillTuning


def hopper_tuning(
    *, num_units: int, head_dim: int, num_programs: int, num_terms: int = 1
) -> HopperTuning:
    """Sizes measured best on an H200 (docs/performance.md); all fit its shared memory.

    Args:
      num_units: rows times KV heads of a decode step. Few of them are cut into many parts each:
        then fewer workers leave fewer parts to merge.
      num_terms: of queries (`terms`). Steps with two have few tokens: one attender holds them, and
        their terms have the other one's room.
    """
    num_workers, stages = (num_programs, 4) if num_units <= num_programs else (2 * num_programs, 2)
    prefill = HopperPrefillTuning(num_programs=num_programs)
    if head_dim > 128:
        num_workers, stages = num_programs, 2
        prefill = HopperPrefillTuning(64, 2, q_slots=1, num_programs=num_programs)
    if num_terms > 1:
        prefill = replace(prefill, attenders=1)
    decode = HopperDecodeTuning(64, stages, num_workers)
    return HopperTuning(decode, prefill)


@dataclass(frozen=True)
class TPUPhaseTuning:
    """Tiles of one phase of the TPU kernels.

    Attributes:
      fetch: KV tokens that one buffer holds.
      compute: KV tokens of one online-softmax update; divides `fetch`.
      num_buffers: buffers of `fetch` tokens; all but one are being filled while one is used.
      queries: decode: rows of one grid step; prefill: tokens of a query tile, a power of two.
    """

    fetch: int
    compute: int
    num_buffers: int
    queries: int

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.fetch % self.compute:
            raise ValueError(f"{self.fetch=} must be a multiple of {self.compute=}")


@dataclass(frozen=True)
class TPUTuning:
    """Tiles of the TPU kernels.

    Attributes:
      head_groups: equal shares of the KV heads. A chip whose two cores are one device (v5p) works
        on two side by side; elsewhere 1.
    """

    decode: TPUPhaseTuning
    prefill: TPUPhaseTuning
    head_groups: int = 1

    def __post_init__(self):
        queries = self.prefill.queries
        if queries & (queries - 1):
            raise ValueError(f"{queries=} of prefill must be a power of two")


@dataclass(frozen=True)
class TPUGeneration:
    """What a kernel must know of a device. Bytes and rates are of one device, as JAX counts them.

    Attributes:
      vmem_bytes, smem_bytes: of one core.
      num_cores: cores of a device, which share its memory.
      hbm_bytes_per_s, flops_per_s: as published; bf16.
      in_flight_bytes: that keep the memory busy: its rate times about 2 us of latency.
    """

    name: str
    vmem_bytes: int
    smem_bytes: int
    num_cores: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float

    @property
    def in_flight_bytes(self) -> int:
        return int(self.hbm_bytes_per_s * 2e-6)


_MIB = 2**20

# By JAX's device_kind. Rates: Cloud TPU's system architecture pages; sizes: as JAX has them.
# A v5p chip is one device of two cores, a 7x chip two devices.
TPU_GENERATIONS = {
    "TPU v5 lite": TPUGeneration("v5e", 128 * _MIB, _MIB, 1, 16 * 2**30, 0.819e12, 197e12),
    "TPU v6 lite": TPUGeneration("v6e", 128 * _MIB, _MIB, 1, 32 * 2**30, 1.64e12, 918e12),
    "TPU v5": TPUGeneration("v5p", 64 * _MIB, _MIB, 2, 95 * 2**30, 2.765e12, 459e12),
    "TPU7x": TPUGeneration("7x", 64 * _MIB, _MIB, 1, 96 * 2**30, 3.69e12, 1153.5e12),
}


# Tiles that scripts/tune_tpu.py measured to be the best, by device_kind and bytes of one token's K
# and V in one layer on one device. None yet: nobody has run it.
MEASURED_TPU_TILES: dict[tuple[str, int], TPUTuning] = {}


def default_tpu_tuning(
    device_kind: str, *, token_bytes: int, num_kv_heads: int, group: int, block_size: int
) -> TPUTuning:
    """Measured tiles, or else those of the estimate (docs/tpu.md).

    Args:
      device_kind: JAX's name of the device; an unknown one is taken for the smallest.
      token_bytes: of one token's K and V in one layer, on one device.
      group: query heads of a KV head.
    """
    if measured := MEASURED_TPU_TILES.get((device_kind, token_bytes)):
        return measured
    generation = TPU_GENERATIONS.get(device_kind, TPU_GENERATIONS["TPU v5 lite"])
    groups = 2 if generation.num_cores == 2 and num_kv_heads % 2 == 0 else 1
    # A buffer holds what keeps memory busy, so that two more in flight forgive an uneven start.
    fetch = _power_of_two(generation.in_flight_bytes // token_bytes)
    # No more of VMEM than all buffers may take, where tokens are wide.
    room = generation.vmem_bytes // 16 * groups // token_bytes
    fetch = _whole_blocks(min(max(fetch, 256), 2048, _power_of_two(room)), block_size)
    compute = min(fetch, _whole_blocks(512, block_size))
    # 512 query rows of a matrix product fill the unit; more only cost VMEM.
    queries = min(max(_power_of_two(512 // group), 16), 256)
    return TPUTuning(
        decode=TPUPhaseTuning(fetch=fetch, compute=compute, num_buffers=3, queries=8),
        prefill=TPUPhaseTuning(fetch=compute, compute=compute, num_buffers=3, queries=queries),
        head_groups=groups,
    )


def phase_vmem_bytes(
    phase: TPUPhaseTuning,
    *,
    token_bytes: int,
    num_heads: int,
    num_queries: int,
    num_blocks: int,
    lanes: int,
    itemsize: int,
) -> int:
    """An estimate of a phase's VMEM, from above.

    Args:
      token_bytes: of one token's K and V of the heads that a core works on.
      num_heads: KV heads that a core works on.
      num_queries: query rows of one KV head that are computed together.
      num_blocks: groups of them in one grid step.
    """
    buffers = phase.num_buffers * phase.fetch * token_bytes
    rows = num_heads * num_queries
    # Queries and output, twice each, as the pipeline fetches the next and writes the last.
    operands = 4 * num_blocks * rows * lanes * itemsize
    state = rows * 4 * (lanes + 2 * 128)
    # Scores, weights, masks and what the compiler keeps of them between its stages.
    scores = 8 * 4 * num_queries * phase.compute
    return buffers + operands + state + scores


def shrink_to(tuning: TPUPhaseTuning, max_tokens: int, block_size: int) -> TPUPhaseTuning:
    """No more KV tokens in a buffer than a row can have."""
    fetch = min(tuning.fetch, _whole_blocks(_power_of_two(2 * max_tokens - 1), block_size))
    return replace(tuning, fetch=fetch, compute=min(tuning.compute, fetch))


def _power_of_two(value: int) -> int:
    """The largest one that is not above."""
    return 1 << max(value, 1).bit_length() - 1


def _whole_blocks(tokens: int, block_size: int) -> int:
    """A multiple of the block size, at least one block; a power of two if the block size is."""
    return max(tokens // block_size, 1) * block_size
