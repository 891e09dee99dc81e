"""Constraints over gRPC, before an engine with a tiny real model in a process of its own."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import grpc
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.constraints import CASES, CHOICES
from helpers.running_service import EOF, Service, run_service

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.client import AsyncClient
from jaxpaged.config import EngineConfig
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.grammar import Vocabulary
from jaxpaged.process_client import start_in_process
from jaxpaged.request import FinishReason
from jaxpaged.request_maker import FrontModel
from jaxpaged.sampling_params import Constraint, SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.v1 import inference_pb2 as pb

MODEL = str(Path(__file__).parents[1] / "goldens" / "tiny_llama")
PROMPT = [9, 40, 77, 130, 8]


@pytest.fixture(scope="module")
def llm() -> Generator[AsyncLLM]:
    # As in test_real_server: its programs are compiled once for both.
    config = EngineConfig(MODEL, max_num_seqs=2, max_num_tokens=32)
    tokenizer = ByteTokenizer()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    model = FrontModel(config, tokenizer, SamplingDefaults(), frozenset({EOS}), vocabulary)
    llm = AsyncLLM.from_client(model, partial(start_in_process, config, vocabulary))
    yield llm
    llm.close()


def sampled(seed: int, constraint: Constraint, **options) -> SamplingParams:
    return SamplingParams(max_tokens=100, seed=seed, constraint=constraint, **options)


def test_each_kind_unary_and_streamed(llm):
    async def body(service: Service) -> None:
        async with AsyncClient(service.address) as client:
            for name, case in CASES.items():
                for seed in range(3):
                    params = sampled(seed, case.constraint, temperature=1.0, n=2)
                    unary = (await client.generate(PROMPT, params)).completions
                    deltas = [delta async for delta in client.stream(PROMPT, params)]
                    in_process = (await llm.generate(PROMPT, params)).completions
                    for completion in unary:
                        assert case.allows(completion.text), f"{name}: {completion.text!r}"
                        assert completion.finish_reason is FinishReason.EOS
                        own = [d.text for d in deltas if d.index == completion.index]
                        assert "".join(own) == completion.text
                        other = in_process[completion.index]
                        assert other.token_ids == completion.token_ids
        assert (await llm.stats()).compiles_after_warmup == 0

    run_service(llm, body)


def test_the_oneof_of_the_contract(llm):
    async def body(service: Service) -> None:
        request = pb.GenerateRequest(token_ids={"ids": PROMPT}, sampling={"max_tokens": 100})
        for field, value in (
            ("json_schema", '{"enum": ["only"]}'),
            ("regex", "on{2}ly"),
            ("grammar", 'start: "only"'),
        ):
            setattr(request.sampling, field, value)  # the one before is unset by it
            assert request.sampling.WhichOneof("constraint") == field
            (completion,) = (await service.stub.Generate(request)).completions
            wanted = {"json_schema": '"only"', "regex": "onnly", "grammar": "only"}[field]
            assert completion.text == wanted
            assert completion.finish_reason == pb.FINISH_REASON_EOS
        request.sampling.choice.choices.extend(CHOICES)
        call, text = service.stub.Stream(pb.StreamRequest(request=request)), ""
        while (message := await call.read()) is not EOF:
            text += message.delta.text
        assert text in CHOICES

    run_service(llm, body)


@pytest.mark.parametrize(
    ("constraint", "field", "line"),
    [
        (Constraint(regex="a("), "constraint.regex", "unclosed group"),
        (Constraint(json_schema={"type": "nothing"}), "constraint.json_schema", "nothing"),
        (Constraint(grammar="start: missing"), "constraint.grammar", "missing"),
        (Constraint(choice=[]), "constraint.choice", "at least one string"),
    ],
)
def test_refusals_have_the_compiler_s_words(constraint, field, line, llm):
    async def body(service: Service) -> None:
        async with AsyncClient(service.address) as client:
            with pytest.raises(InvalidFieldError, match=line) as error:
                await client.generate(PROMPT, sampled(0, constraint))
            assert error.value.field == field
            assert isinstance(error.value.__cause__, grpc.aio.AioRpcError)
            assert error.value.__cause__.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(InvalidFieldError, match=line):
                [delta async for delta in client.stream(PROMPT, sampled(0, constraint))]

    run_service(llm, body)


def test_a_function_reaches_neither_a_server_nor_another_process(llm):
    async def body(service: Service) -> None:
        params = SamplingParams(logits_processor=lambda logits, state: logits)
        async with AsyncClient(service.address) as client:
            with pytest.raises(UnsupportedOptionError, match="cannot be sent") as error:
                await client.generate(PROMPT, params)
            assert error.value.field == "logits_processor"
        with pytest.raises(UnsupportedOptionError, match="needs the engine in this") as error:
            await llm.generate(PROMPT, params)
        assert error.value.field == "logits_processor"
        assert len((await llm.generate(PROMPT)).completions) == 1

    run_service(llm, body)
