"""Presence survives the wire in both directions, and what it cannot carry is refused."""

import dataclasses
import json
import math

import pytest
from helpers.fake_async_llm import BLOCKS, MODEL_INFO, STATS

from jaxpaged.convert import params_from_proto, prompt_from_proto, request_to_proto
from jaxpaged.convert_outputs import (
    blocks_from_proto,
    blocks_to_proto,
    event_from_proto,
    info_from_proto,
    info_to_proto,
    output_from_proto,
    stats_from_proto,
    stats_to_proto,
)
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.outputs import Heartbeat
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, Constraint, SamplingParams
from jaxpaged.v1 import inference_pb2 as pb

# Every field, with a value that float32 holds exactly.
FULL = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_k=3,
    top_p=0.75,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=-(2**63),
    n=4,
    logit_bias={5: -1.5, 9: 2.0},
    allowed_token_ids=[1, 2],
    stop=["a", "안"],
    stop_token_ids=[0, 4],
    ignore_eos=True,
    include_stop_string=True,
    logprobs=3,
    prompt_logprobs=1,
    skip_special_tokens=False,
    use_prefix_cache=False,
    cache_salt="tenant",
    priority=-2,
    constraint=Constraint(choice=["yes", "no"]),
)
# Zero is a value of its own for each of these, different from unset.
ZEROS = SamplingParams(
    max_tokens=0,
    min_tokens=0,
    temperature=0.0,
    top_k=0,
    top_p=0.0,
    min_p=0.0,
    repetition_penalty=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    n=0,
    ignore_eos=False,
    include_stop_string=False,
    logprobs=0,
    prompt_logprobs=0,
    skip_special_tokens=False,
    use_prefix_cache=False,
    priority=0,
)


def over_the_wire(params: SamplingParams | None) -> SamplingParams:
    data = request_to_proto("x", params).SerializeToString()
    return params_from_proto(pb.GenerateRequest.FromString(data))


def test_the_full_example_sets_every_field():
    unset = [name for name, value in dataclasses.asdict(FULL).items() if value is None]
    assert unset == ["logits_processor"], "a function cannot be sent"
    with pytest.raises(UnsupportedOptionError, match="logits_processor"):
        over_the_wire(SamplingParams(logits_processor=lambda logits, state: logits))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json_schema='{"type": "object"}'),
        Constraint(regex="a+"),
        Constraint(choice=["안", "b"]),
        Constraint(grammar='start: "a"'),
    ],
)
def test_constraints_keep_their_kind(constraint):
    assert over_the_wire(SamplingParams(constraint=constraint)).constraint == constraint


def test_a_schema_travels_as_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sent = over_the_wire(SamplingParams(constraint=Constraint(json_schema=schema))).constraint
    assert sent is not None and json.loads(str(sent.json_schema)) == schema


@pytest.mark.parametrize("constraint", [Constraint(), Constraint(regex="a", grammar="b")])
def test_one_constraint_at_a_time(constraint):
    with pytest.raises(InvalidFieldError, match="must set exactly one of"):
        over_the_wire(SamplingParams(constraint=constraint))


@pytest.mark.parametrize("params", [FULL, ZEROS, SamplingParams()])
def test_params_keep_every_field_and_its_presence(params: SamplingParams):
    assert over_the_wire(params) == params


def test_no_params_are_unset_params():
    assert over_the_wire(None) == SamplingParams()


def test_equivalent_spellings():
    assert over_the_wire(SamplingParams(top_k=-1)).top_k == 0
    assert over_the_wire(SamplingParams(stop="a")).stop == ["a"]
    assert over_the_wire(SamplingParams(stop=[], stop_token_ids=[])) == SamplingParams()


def test_non_finite_values_travel_so_that_the_server_refuses_them():
    temperature = over_the_wire(SamplingParams(temperature=math.nan)).temperature
    assert temperature is not None and math.isnan(temperature)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(n=2**32), "n"),
        (SamplingParams(seed=2**63), "seed"),
        (SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=[]), "allowed_token_ids"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (SamplingParams(stop=["\ud800"]), "stop"),
        (SamplingParams(constraint=Constraint(choice=[1])), "constraint.choice"),  # type: ignore[list-item]
        (SamplingParams(constraint=Constraint(grammar="\ud800")), "constraint.grammar"),
    ],
)
def test_client_refuses_what_the_wire_cannot_carry(params: SamplingParams, field: str):
    with pytest.raises(InvalidFieldError, match=field) as caught:
        request_to_proto("x", params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([1, -1], "token_ids"),
        ([2**40], "token_ids"),
        ("\ud800", "text"),
        (ChatPrompt([{"role": "user", "content": "x", "name": "y"}]), "messages"),
        (ChatPrompt([{"role": "user", "content": 5}]), "messages"),  # type: ignore[dict-item]
        (ChatPrompt([], template_args={"x": object()}), "template_args"),
        (ChatPrompt([{"role": "user", "content": [{"text": "x"}]}]), "content in parts"),  # type: ignore[dict-item]
    ],
)
def test_client_refuses_prompts_that_cannot_be_sent(prompt, field: str):
    with pytest.raises(InvalidFieldError, match=field):
        request_to_proto(prompt, None)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "안녕\n🙂",
        [],
        [0, 5, 2**32 - 1],
        ChatPrompt([]),
        ChatPrompt([{"role": "user", "content": "x"}], False, {"a": [1, 2.5, {"b": None}]}),
    ],
)
def test_prompts_arrive_as_they_are(prompt):
    data = request_to_proto(prompt, None).SerializeToString()
    assert prompt_from_proto(pb.GenerateRequest.FromString(data)) == prompt


def test_info_stats_and_blocks_return_as_they_were():
    assert info_from_proto(info_to_proto(MODEL_INFO)) == MODEL_INFO
    no_bos = dataclasses.replace(MODEL_INFO, bos_token_id=None)
    assert info_from_proto(info_to_proto(no_bos)) == no_bos
    assert stats_from_proto(stats_to_proto(STATS), STATS.block_size) == STATS
    assert blocks_from_proto(blocks_to_proto(BLOCKS)) == BLOCKS


def test_client_tolerates_what_a_newer_server_sends():
    heartbeat = pb.StreamResponse(heartbeat={"queue_position": 3})
    assert event_from_proto(heartbeat) == Heartbeat(queue_position=3)
    assert event_from_proto(pb.StreamResponse()) is None
    response = pb.GenerateResponse(completions=[{}])
    response.completions[0].finish_reason = 77  # type: ignore[assignment]
    assert output_from_proto(response).completions[0].finish_reason is FinishReason.ERROR
