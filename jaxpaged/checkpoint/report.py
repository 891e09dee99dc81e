"""Compares the tensors that a model needs with those that a checkpoint has."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from jaxpaged.errors import CheckpointError

# Buffers that old versions of other libraries saved, and that are computed from the config.
_COMPUTED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",
    ".attn.masked_bias",
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightReport:
    """What does not fit, sorted by name.

    Attributes:
      missing: needed, and not in the checkpoint.
      unexpected: in the checkpoint, and used by nothing.
      misshapen: name -> (shape needed, shape found).
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, tuple[Shape, Shape]]

    @property
    def is_good(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def raise_if_bad(self) -> None:
        """Raises CheckpointError naming every tensor, unless all of them fit."""
        if self.is_good:
            return
        parts = []
        if self.missing:
            parts.append(f"missing: {', '.join(self.missing)}")
        if self.unexpected:
            parts.append(f"unexpected: {', '.join(self.unexpected)}")
        if self.misshapen:
            shapes = [
                f"{name} is {list(found)}, needed {list(needed)}"
                for name, (needed, found) in self.misshapen.items()
            ]
            parts.append(f"wrong shape: {', '.join(shapes)}")
        raise CheckpointError(f"the weights do not fit the config; {'; '.join(parts)}")


def match_names(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    optional: Set[str] = frozenset(),
) -> WeightReport:
    """Compares by name and shape; tensors that are computed at load anyway are no surprise.

    Args:
      optional: of the expected names, those that may be absent; of others, those that may be there.
    """
    return WeightReport(
        missing=tuple(sorted(expected.keys() - found.keys() - optional)),
        unexpected=tuple(
            name
            for name in sorted(found.keys() - expected.keys() - optional)
            if not name.endswith(_COMPUTED_SUFFIXES)
        ),
        misshapen={
            name: (tuple(expected[name]), tuple(found[name]))
            for name in sorted(expected.keys() & found.keys())
            if tuple(expected[name]) != tuple(found[name])
        },
    )
