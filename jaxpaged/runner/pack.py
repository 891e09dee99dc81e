"""Step plan -> packed vector, on the host."""

import dataclasses

import numpy as np

from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.inputs import FED_BACK, NUM_OPTIONS, SampleOptions, StepLayout
from jaxpaged.runner.sampling import Variant
from jaxpaged.step_plan import RowStart, StepPlan


class Packer:
    """Packs plans; keeps each row's sampling options, which a plan names only when they change."""

    def __init__(self, buckets: list[Bucket], *, max_num_seqs: int, block_size: int):
        self._layouts = {bucket: StepLayout.of(bucket, block_size) for bucket in buckets}
        self._null_row = max_num_seqs
        # The null row's options stay 0: greedy.
        self._options = np.zeros((NUM_OPTIONS, max_num_seqs + 1), np.int32)
        # How many best tokens each row wants told; -1 = nothing.
        self._num_best = np.full(max_num_seqs + 1, -1, np.int32)
        # Of rows that are drawn at random, how many of top_k and top_p are on.
        self._num_limits = np.zeros(max_num_seqs + 1, np.int32)
        self._templates = {bucket: self._padding(bucket) for bucket in buckets}

    def start_rows(self, starts: list[RowStart]) -> None:
        """Takes over the options of sequences that were given a row."""
        for start in starts:
            self._options[:, start.row] = dataclasses.astuple(_sample_options(start))
            params = start.params
            num_limits = (params.top_k > 0) + (params.top_p < 1)
            self._num_limits[start.row] = num_limits if params.temperature > 0 else 0
            num_best = params.logprobs
            self._num_best[start.row] = -1 if num_best is None else num_best

    def variant(self, plan: StepPlan) -> Variant:
        """The least that draws every token of the plan."""
        if not self._options[_TEMPERATURE, plan.sample_rows].any():
            return Variant.GREEDY
        most = self._num_limits[plan.sample_rows].max()
        return (Variant.RANDOM, Variant.LIMITED, Variant.LIMITED_BOTH)[most]

    def is_adjusted(self, plan: StepPlan) -> bool:
        """Whether the logits of any token of the plan change before it is drawn."""
        return bool(self._options[_REPETITION_PENALTY, plan.sample_rows].any())

    def num_best(self, plan: StepPlan) -> np.ndarray | None:
        """Per token to draw, how many best tokens are to be told; None when nothing is, of any."""
        num_best = self._num_best[plan.sample_rows]
        return num_best if (num_best >= 0).any() else None

    def pack(
        self, plan: StepPlan, bucket: Bucket, updates: list[tuple[int, int, int]]
    ) -> np.ndarray:
        """Fills a fresh vector: the device may still read the one before.

        Args:
          updates: the plan's table updates, or as many of them as the layout holds.
        """
        packed = self._templates[bucket].copy()
        parts = self._layouts[bucket].split(packed)
        num_rows, num_samples = len(plan.rows), len(plan.sample_rows)
        parts["num_decode_rows"][0] = plan.num_decode_rows
        parts["token_ids"][: plan.num_decode_rows] = FED_BACK
        for idx, token_id in plan.known_tokens.items():
            parts["token_ids"][idx] = token_id
        parts["token_ids"][plan.num_decode_rows : plan.num_tokens] = plan.token_ids
        parts["rows"][:num_rows] = plan.rows
        parts["q_lens"][:num_rows] = plan.q_lens
        parts["kv_lens"][:num_rows] = plan.kv_lens
        if updates:
            columns = np.array(updates, np.int32).T
            for name, column in zip(_UPDATE_PARTS, columns, strict=True):
                parts[name][: len(updates)] = column
        parts["sample_sources"][:num_samples] = plan.sample_sources
        parts["sample_rows"][:num_samples] = plan.sample_rows
        options = parts["sample_options"].reshape(NUM_OPTIONS, -1)
        options[:, :num_samples] = self._options[:, plan.sample_rows]
        return packed

    def _padding(self, bucket: Bucket) -> np.ndarray:
        layout = self._layouts[bucket]
        packed = np.zeros(layout.size, np.int32)
        parts = layout.split(packed)
        for name in ("rows", "update_rows", "sample_rows"):
            parts[name][:] = self._null_row
        return packed


def _sample_options(start: RowStart) -> SampleOptions:
    params = start.params
    words = np.array([start.seed >> 32, start.seed & 0xFFFFFFFF], np.int64)
    seed_high, seed_low = words.astype(np.uint32).view(np.int32).tolist()
    options = SampleOptions(
        temperature=_bits(params.temperature),
        top_k=params.top_k,
        top_p=_bits(params.top_p),
        min_p=_bits(params.min_p),
        seed_high=seed_high,
        seed_low=seed_low,
    )
    if not params.adjusts_logits:
        return options
    return dataclasses.replace(
        options,
        repetition_penalty=_bits(params.repetition_penalty),
        presence_penalty=_bits(params.presence_penalty),
        frequency_penalty=_bits(params.frequency_penalty),
        first_end_position=start.num_prompt_tokens + params.min_tokens,
    )


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


_NAMES = [option.name for option in dataclasses.fields(SampleOptions)]
_TEMPERATURE = _NAMES.index("temperature")
_REPETITION_PENALTY = _NAMES.index("repetition_penalty")
_UPDATE_PARTS = ("update_rows", "update_idxs", "update_blocks")
