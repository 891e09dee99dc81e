"""Tile sizes. They change how fast a result is made, never the result beyond rounding."""

from dataclasses import dataclass


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
