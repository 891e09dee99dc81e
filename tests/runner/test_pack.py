"""Which variant of the draw the host takes for a step."""

import pytest

from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.pack import Packer
from jaxpaged.runner.sampling import Variant
from jaxpaged.sampling_params import ResolvedParams
from jaxpaged.step_plan import RowStart, StepPlan

GREEDY = ResolvedParams(temperature=0.0, top_k=20, top_p=0.9)
PLAIN = ResolvedParams()
MIN_P = ResolvedParams(min_p=0.1)
TOP_K = ResolvedParams(top_k=20)
TOP_P = ResolvedParams(top_p=0.9, min_p=0.1)
BOTH = ResolvedParams(top_k=20, top_p=0.9)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([GREEDY, GREEDY], Variant.GREEDY),
        ([GREEDY, PLAIN], Variant.RANDOM),
        ([PLAIN, MIN_P], Variant.RANDOM),
        ([PLAIN, TOP_K, TOP_P], Variant.LIMITED),
        ([GREEDY, TOP_K, BOTH], Variant.LIMITED_BOTH),
    ],
)
def test_the_least_variant_that_does_for_every_row(params, expected):
    packer = Packer([Bucket(4, 4)], max_num_seqs=4, block_size=16)
    packer.start_rows([RowStart(row=3, params=BOTH, seed=0)])  # not in the step
    packer.start_rows([RowStart(row, one, seed=0) for row, one in enumerate(params)])
    assert packer.variant(StepPlan(1, sample_rows=list(range(len(params))))) is expected


def test_a_row_that_starts_again_forgets_its_options():
    packer = Packer([Bucket(4, 4)], max_num_seqs=4, block_size=16)
    found = []
    for params in (BOTH, TOP_P, PLAIN, GREEDY):
        packer.start_rows([RowStart(row=0, params=params, seed=0)])
        found.append(packer.variant(StepPlan(1, sample_rows=[0])))
    assert found == [Variant.LIMITED_BOTH, Variant.LIMITED, Variant.RANDOM, Variant.GREEDY]
