"""match_names: every tensor that does not fit is named."""

import pytest

from jaxpaged.checkpoint import match_names
from jaxpaged.errors import CheckpointError

NEEDED = {"a.weight": (2, 3), "b.weight": (4,), "lm_head.weight": (5, 2)}


def test_fitting_weights_pass():
    report = match_names(NEEDED, dict(NEEDED))
    assert report.is_good
    report.raise_if_bad()


def test_every_bad_tensor_is_named():
    found = {"a.weight": (3, 2), "c.weight": (1,), "d.bias": (1,), "lm_head.weight": (5, 2)}
    report = match_names(NEEDED, found)
    assert report.missing == ("b.weight",)
    assert report.unexpected == ("c.weight", "d.bias")
    assert report.misshapen == {"a.weight": ((2, 3), (3, 2))}
    with pytest.raises(CheckpointError) as error:
        report.raise_if_bad()
    assert "missing: b.weight" in str(error.value)
    assert "unexpected: c.weight, d.bias" in str(error.value)
    assert "a.weight is [3, 2], needed [2, 3]" in str(error.value)
    assert "\n" not in str(error.value)


def test_optional_tensors_may_be_absent_or_extra():
    found = {"a.weight": (2, 3), "b.weight": (4,), "extra": (9,)}
    assert match_names(NEEDED, found, optional={"lm_head.weight", "extra"}).is_good
    assert not match_names(NEEDED, found, optional={"extra"}).is_good


def test_an_optional_tensor_that_is_there_must_have_its_shape():
    report = match_names(NEEDED, NEEDED | {"b.weight": (5,)}, optional={"b.weight"})
    assert list(report.misshapen) == ["b.weight"]


def test_computed_buffers_are_no_surprise():
    assert match_names(NEEDED, NEEDED | {"layers.0.self_attn.rotary_emb.inv_freq": (8,)}).is_good
    # A real bias of the same kind of name is one.
    found = NEEDED | {"layers.0.self_attn.q_proj.bias": (8,)}
    assert match_names(NEEDED, found).unexpected == ("layers.0.self_attn.q_proj.bias",)
