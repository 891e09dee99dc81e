#!/usr/bin/env python3
"""Estimates step times on TPUs that nobody has measured here. An estimate, never a measurement.

    scripts/estimate_tpu.py [--block-size 16] [--context 590]

The floor of a step: its bytes over the published bandwidth or its operations over the published
rate, whichever takes longer. The expected time adds what the kernels as written do beyond that:

    DMA     whole blocks and the write unit, not only valid tokens; late where buffers are few
    core    issuing a copy for each block; loading K and V into the matrix units; softmax
    decode  attention takes max(DMA, core): copies run ahead of the arithmetic

What is assumed rather than published stands in `ASSUMED`.
"""

import argparse
from dataclasses import dataclass

from kernels_pallas.tuning import (
    TPU_GENERATIONS,
    TPUGeneration,
    TPUTuning,
    default_tpu_tuning,
)


@dataclass(frozen=True)
class Assumptions:
    """Guesses, on the careful side.

    Attributes:
      stream: share of the bandwidth that streaming weights and blocks reach.
      matrix: share of the matrix rate that large products reach.
      copy_cycles: of the core, to start one copy and to wait for it.
      softmax_ops: vector operations a score, decode and prefill alike.
      small_op_s: an XLA operation that is neither a product nor a kernel of ours.
      small_ops: of them in a layer: norms, RoPE, moving q and the output.
      step_s: what a step has once: embedding, sampling, dispatch.
      grid_step_s: of a kernel's grid.
    """

    stream: float = 0.88
    matrix: float = 0.65
    copy_cycles: float = 60
    softmax_ops: float = 14
    small_op_s: float = 1.2e-6
    small_ops: int = 8
    step_s: float = 150e-6
    grid_step_s: float = 0.35e-6


ASSUMED = Assumptions()
# Edge of a matrix unit; each core has four. A core has 4 x 1024 vector lanes.
MATRIX_EDGE = {"v5e": 128, "v5p": 128, "v6e": 256, "7x": 256}
MATRIX_UNITS = 4
VECTOR_LANES = 4 * 1024
QUERY_ROWS = 16  # a KV head's queries in decode, padded
WRITE_UNIT = 16


@dataclass(frozen=True)
class Model:
    """Shapes, bf16."""

    name: str
    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def layer_params(self) -> int:
        qkv = (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden
        out = self.num_q_heads * self.head_dim * self.hidden
        return qkv + out + 3 * self.hidden * self.intermediate

    @property
    def step_params(self) -> int:
        """Weights that every step reads; the embedding is read in rows."""
        return self.num_layers * self.layer_params + self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.step_params + (0 if self.tied else self.vocab * self.hidden))

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 4 * self.num_kv_heads * self.head_dim


LLAMA_8B = Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False)
QWEN3_4B = Model("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True)


class Device:
    """One device as JAX counts them."""

    def __init__(self, device_kind: str):
        self.kind = device_kind
        self.generation: TPUGeneration = TPU_GENERATIONS[device_kind]
        edge = MATRIX_EDGE[self.generation.name]
        self.num_cores = self.generation.num_cores
        units = MATRIX_UNITS * self.num_cores
        self.clock_hz = self.generation.flops_per_s / (2 * edge * edge * units)
        # Elements of K or V that all units take in a second: a row of each unit in a cycle.
        self.operand_rate = self.clock_hz * edge * units

    def tuning(self, model: Model, block_size: int) -> TPUTuning:
        return default_tpu_tuning(
            self.kind,
            token_bytes=model.token_bytes,
            num_kv_heads=model.num_kv_heads,
            group=model.num_q_heads // model.num_kv_heads,
            block_size=block_size,
        )

    def products_s(self, params: int, num_tokens: int) -> float:
        """Matrix products over weights that are read once."""
        read = 2 * params / (self.generation.hbm_bytes_per_s * ASSUMED.stream)
        return max(read, 2 * params * num_tokens / (self.generation.flops_per_s * ASSUMED.matrix))

    def decode_attention_s(
        self, model: Model, batch: int, context: int, block_size: int
    ) -> tuple[float, float]:
        """One layer: (DMA, core)."""
        phase = self.tuning(model, block_size).decode
        blocks = -(-context // block_size)
        moved = batch * (blocks * block_size + WRITE_UNIT) * model.token_bytes
        in_flight = (phase.num_buffers - 1) * phase.fetch * model.token_bytes
        ahead = min(1.0, in_flight / self.generation.in_flight_bytes)
        dma = moved / (self.generation.hbm_bytes_per_s * ASSUMED.stream * ahead)
        # Each core of a v5p issues its own copies, of half the heads.
        copies = batch * blocks * ASSUMED.copy_cycles / self.clock_hz
        elements = batch * context * model.num_kv_heads * model.head_dim
        operands = 2 * elements / self.operand_rate
        scores = batch * context * model.num_kv_heads * QUERY_ROWS
        softmax = scores * ASSUMED.softmax_ops / (VECTOR_LANES * self.clock_hz * self.num_cores)
        grid = batch / phase.queries * ASSUMED.grid_step_s
        return dma, copies + operands + softmax + grid

    def prefill_attention_s(self, model: Model, num_tokens: int) -> float:
        """One layer, one prompt from its start: matrix units and softmax one after the other."""
        tile = self.tuning(model, 16).prefill
        # Causal: half of the scores, and half a tile more at the edge.
        scores = model.num_q_heads * num_tokens * (num_tokens + tile.compute) / 2
        products = 4 * scores * model.head_dim / (self.generation.flops_per_s * ASSUMED.matrix)
        softmax = scores * ASSUMED.softmax_ops / (VECTOR_LANES * self.clock_hz * self.num_cores)
        return products + softmax

    def decode_step_s(
        self, model: Model, batch: int, context: int, block_size: int
    ) -> tuple[float, float]:
        """(expected, floor)."""
        attention = max(self.decode_attention_s(model, batch, context, block_size))
        small = ASSUMED.small_ops * ASSUMED.small_op_s
        expected = self.products_s(model.step_params, batch) + ASSUMED.step_s
        expected += model.num_layers * (attention + small)
        kv_bytes = model.num_layers * batch * context * model.token_bytes
        read = (2 * model.step_params + kv_bytes) / self.generation.hbm_bytes_per_s
        compute = 2 * model.step_params * batch / self.generation.flops_per_s
        return expected, max(read, compute)

    def prefill_s(self, model: Model, num_tokens: int) -> float:
        small = ASSUMED.small_ops * ASSUMED.small_op_s
        params = model.num_layers * model.layer_params
        layers = model.num_layers * (self.prefill_attention_s(model, num_tokens) + small)
        return self.products_s(params, num_tokens) + layers + ASSUMED.step_s


def serving_rate(device: Device, model: Model, num_in: int, num_out: int, block_size: int):
    """Output tokens a second with the pool full of equal requests, and how many run at once."""
    room = 0.9 * device.generation.hbm_bytes - model.weight_bytes - 0.3e9
    per_request = model.num_layers * model.token_bytes * (num_in + num_out)
    batch = min(int(room / per_request), 256)
    if batch < 1:
        return 0.0, 0
    step, _ = device.decode_step_s(model, batch, num_in + num_out // 2, block_size)
    return num_out / (device.prefill_s(model, num_in) + num_out * step / batch), batch


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimates step times on TPUs.")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--context", type=int, nargs="+", default=[590, 2130])
    args = parser.parse_args()
    print("Estimates, not measurements. One device (7x: half a chip), bf16, greedy decode.\n")
    print("| TPU | model | batch x context | floor ms | expected ms | share | DMA / core ms |")
    print("|---|---|---|---|---|---|---|")
    for kind, generation in TPU_GENERATIONS.items():
        device = Device(kind)
        for model in (QWEN3_4B, LLAMA_8B):
            if model.weight_bytes > 0.9 * generation.hbm_bytes:
                continue
            for batch in (1, 64):
                for context in args.context:
                    expected, floor = device.decode_step_s(model, batch, context, args.block_size)
                    parts = device.decode_attention_s(model, batch, context, args.block_size)
                    dma, core = (1e3 * model.num_layers * part for part in parts)
                    print(
                        f"| {generation.name} | {model.name} | {batch} x {context} | "
                        f"{floor * 1e3:.2f} | {expected * 1e3:.2f} | {floor / expected:.0%} | "
                        f"{dma:.2f} / {core:.2f} |"
                    )
    rate, batch = serving_rate(Device("TPU v6 lite"), LLAMA_8B, 1800, 128, args.block_size)
    print(
        f"\nLlama-3.1-8B on one v6e, 1800 in / 128 out: {rate:.0f} output tokens/s, {batch} at once"
    )
    print("\n| TPU | decode: fetch x buffers, compute | bytes ahead | prefill: queries x keys |")
    print("|---|---|---|---|")
    for kind, generation in TPU_GENERATIONS.items():
        tuning = Device(kind).tuning(LLAMA_8B, args.block_size)
        decode, prefill = tuning.decode, tuning.prefill
        ahead = (decode.num_buffers - 1) * decode.fetch * LLAMA_8B.token_bytes
        print(
            f"| {generation.name} | {decode.fetch} x {decode.num_buffers}, {decode.compute} | "
            f"{ahead / 2**20:.1f} MiB of {generation.in_flight_bytes / 2**20:.1f} | "
            f"{prefill.queries} x {prefill.compute} |"
        )


if __name__ == "__main__":
    main()
