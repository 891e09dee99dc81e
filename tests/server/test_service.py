"""Generate, Stream, Tokenize, Detokenize and GetModelInfo against the fake front."""

import asyncio

import grpc
import pytest
from helpers.fake_async_llm import ANSWER, MODEL_INFO
from helpers.running_server import Running, with_server

from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt
from jaxpaged.v1 import inference_pb2 as pb

TEXT = "".join(ANSWER)


def test_generate_answers_with_everything_that_is_on_by_default():
    async def body(running: Running) -> None:
        running.llm.matched_stop = "세"
        running.llm.finish_reason = FinishReason.STOP_STRING
        request = pb.GenerateRequest(request_id="r1", text="hi", sampling={"n": 2, "seed": 5})
        response = await running.stub.Generate(request)
        assert response.request_id == "r1"
        assert (response.model, response.weights_version) == ("fake", "w1")
        assert [c.text for c in response.completions] == [TEXT, TEXT]
        assert [list(c.token_ids) for c in response.completions] == [[10, 11, 12, 13]] * 2
        assert [c.seed for c in response.completions] == [5, 6]
        assert response.completions[0].finish_reason == pb.FINISH_REASON_STOP_STRING
        assert response.completions[0].stop_string == "세"
        assert list(response.prompt_token_ids) == []
        assert response.usage.prompt_tokens == 3 and response.usage.completion_tokens == 4
        assert response.timing.total.ToNanoseconds() == 1_500_000_000

    with_server(body)


def test_generate_leaves_out_what_is_turned_off():
    async def body(running: Running) -> None:
        output = {"text": False, "token_ids": False, "prompt_token_ids": True}
        response = await running.stub.Generate(pb.GenerateRequest(text="hi", output=output))
        assert response.completions[0].text == ""
        assert list(response.completions[0].token_ids) == []
        assert list(response.prompt_token_ids) == [1, 2, 3]

    with_server(body)


def test_server_makes_a_request_id_when_the_client_gives_none():
    async def body(running: Running) -> None:
        first = await running.stub.Generate(pb.GenerateRequest(text="a"))
        second = await running.stub.Generate(pb.GenerateRequest(text="a"))
        assert first.request_id and second.request_id and first.request_id != second.request_id
        assert [call[2] for call in running.llm.calls] == [first.request_id, second.request_id]

    with_server(body)


def test_stream_order_and_joined_text():
    async def body(running: Running) -> None:
        running.llm.matched_stop = 13
        running.llm.finish_reason = FinishReason.STOP_TOKEN
        request = pb.StreamRequest(request=pb.GenerateRequest(request_id="s", text="hi"))
        call = running.stub.Stream(request)
        messages = [message async for message in call]
        kinds = [message.WhichOneof("event") for message in messages]
        assert kinds == ["accepted", "started", *["delta"] * 4, "finished"]
        assert [message.message_index for message in messages] == list(range(7))
        accepted = messages[0].accepted
        assert (accepted.request_id, accepted.model, accepted.seed) == ("s", "fake", 99)
        assert accepted.prompt_tokens == 3 and list(accepted.prompt_token_ids) == []
        assert messages[1].started.cached_prompt_tokens == 1
        deltas = [message.delta for message in messages[2:-1]]
        assert "".join(delta.text for delta in deltas) == TEXT
        assert [delta.finish_reason for delta in deltas] == [0, 0, 0, pb.FINISH_REASON_STOP_TOKEN]
        assert deltas[-1].stop_token_id == 13
        assert messages[-1].finished.usage.completion_tokens == 4

    with_server(body)


def test_stream_without_ids_sends_no_empty_delta():
    async def body(running: Running) -> None:
        source = pb.GenerateRequest(text="hi", output={"token_ids": False})
        messages = [m async for m in running.stub.Stream(pb.StreamRequest(request=source))]
        deltas = [m.delta for m in messages if m.HasField("delta")]
        assert [delta.text for delta in deltas] == [text for text in ANSWER if text]
        assert [m.message_index for m in messages] == list(range(len(messages)))

    with_server(body)


def test_acceptance_sends_initial_metadata_before_any_token():
    async def body(running: Running) -> None:
        running.llm.hold.clear()
        call = running.stub.Stream(pb.StreamRequest(request=pb.GenerateRequest(text="hi")))
        await asyncio.wait_for(call.initial_metadata(), timeout=10)
        assert len(running.llm.running) == 1
        call.cancel()

    with_server(body)


@pytest.mark.parametrize("when", ["at once", "after the first delta"])
def test_cancelled_stream_closes_the_generator(when: str):
    async def body(running: Running) -> None:
        running.llm.hold.clear()
        source = pb.GenerateRequest(request_id="gone", text="hi")
        call = running.stub.Stream(pb.StreamRequest(request=source))
        if when == "after the first delta":
            while not (await call.read()).HasField("delta"):
                pass
        else:
            await call.initial_metadata()
        assert running.llm.running == {"gone"}
        call.cancel()
        await _until(lambda: running.llm.ended == ["gone"])
        assert running.llm.running == set()

    with_server(body)


def test_stream_cancelled_while_a_message_is_being_written_closes_the_generator():
    async def body(running: Running) -> None:
        running.llm.texts = ["x" * 2_000_000] * 8  # more than the flow-control window holds
        call = running.stub.Stream(pb.StreamRequest(request={"request_id": "slow", "text": "x"}))
        while not (await call.read()).HasField("delta"):
            pass
        await asyncio.sleep(0.2)
        assert running.llm.running == {"slow"}
        call.cancel()
        await _until(lambda: running.llm.ended == ["slow"])

    with_server(body)


def test_cancelled_and_expired_generate_end_the_request():
    async def body(running: Running) -> None:
        running.llm.hold.clear()
        call = running.stub.Generate(pb.GenerateRequest(request_id="unary", text="hi"))
        await _until(lambda: running.llm.running == {"unary"})
        call.cancel()
        await _until(lambda: running.llm.ended == ["unary"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Generate(
                pb.GenerateRequest(request_id="late", text="x"), timeout=0.3
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await _until(lambda: running.llm.ended == ["unary", "late"])

    with_server(body)


def test_lost_connection_ends_the_request():
    async def body(running: Running) -> None:
        running.llm.hold.clear()
        async with grpc.aio.insecure_channel(running.address) as channel:
            method = channel.unary_stream(
                "/jaxpaged.v1.InferenceService/Stream",
                request_serializer=pb.StreamRequest.SerializeToString,
                response_deserializer=pb.StreamResponse.FromString,
            )
            call = method(pb.StreamRequest(request=pb.GenerateRequest(request_id="c", text="hi")))
            await call.read()
        await _until(lambda: running.llm.ended == ["c"])

    with_server(body)


def test_prompts_of_every_kind_reach_the_front():
    async def body(running: Running) -> None:
        chat = pb.ChatMessages(
            messages=[{"role": "user", "content": "hey"}], add_generation_prompt=False
        )
        chat.template_args.update({"think": False, "depth": 2, "ratio": 0.5, "names": ["a", None]})
        await running.stub.Generate(pb.GenerateRequest(text="안녕"))
        await running.stub.Generate(pb.GenerateRequest(token_ids={"ids": [1, 0, 2]}))
        await running.stub.Generate(pb.GenerateRequest(chat=chat))
        await running.stub.Generate(pb.GenerateRequest(chat={"messages": []}))
        args = {"think": False, "depth": 2, "ratio": 0.5, "names": ["a", None]}
        assert [call[0] for call in running.llm.calls] == [
            "안녕",
            [1, 0, 2],
            ChatPrompt([{"role": "user", "content": "hey"}], False, args),
            ChatPrompt([], True, None),
        ]
        sent = running.llm.calls[2][0]
        assert isinstance(sent, ChatPrompt) and sent.template_args is not None
        assert type(sent.template_args["depth"]) is int

    with_server(body)


def test_tokenize_and_detokenize():
    async def body(running: Running) -> None:
        tokenize, detokenize = running.stub.Tokenize, running.stub.Detokenize
        response = await tokenize(pb.TokenizeRequest(text="hi"))
        assert list(response.token_ids) == [0, 104, 105]
        assert list(response.token_bytes) == [b"\0", b"h", b"i"]
        response = await tokenize(pb.TokenizeRequest(text="hi", add_special_tokens=False))
        assert list(response.token_ids) == [104, 105]
        chat = pb.ChatMessages(messages=[{"role": "user", "content": "x"}])
        assert list((await tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == [0, 120]
        assert (await detokenize(pb.DetokenizeRequest(token_ids=[0, 104]))).text == "h"
        kept = pb.DetokenizeRequest(token_ids=[0, 104], skip_special_tokens=False)
        assert (await detokenize(kept)).text == "\0h"

    with_server(body)


def test_model_info_publishes_the_defaults():
    async def body(running: Running) -> None:
        info = await running.stub.GetModelInfo(pb.GetModelInfoRequest(model="fake"))
        assert (info.model, info.weights_version) == ("fake", "w1")
        assert info.server_version and info.started_at.seconds > 0
        assert list(info.eos_token_ids) == [256, 257]
        assert info.HasField("bos_token_id") and info.bos_token_id == 0
        assert (info.block_size, info.num_blocks, info.max_model_len) == (16, 64, 512)
        assert info.max_n == 64 and info.max_request_bytes == 64 * 2**20
        assert info.default_sampling.temperature == MODEL_INFO.default_temperature
        assert info.default_sampling.HasField("min_p") and info.default_sampling.min_p == 0
        assert info.default_output.text and not info.default_output.prompt_token_ids

    with_server(body)


async def _until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
