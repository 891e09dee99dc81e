"""Files of a model -> its config and named tensors."""

from jaxpaged.checkpoint.locate import locate
from jaxpaged.checkpoint.protocol import Checkpoint, eos_token_ids
from jaxpaged.checkpoint.report import WeightReport, match_names

__all__ = ["Checkpoint", "WeightReport", "eos_token_ids", "locate", "match_names"]
