"""UpdateWeights: a real model takes other weights without a compile, and who runs is told."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from helpers.running_service import EOF, Service, ask, run_service
from helpers.served_engines import STALL, STALL_S
from helpers.tiny_models import hf_config, random_checkpoint, tiny_config
from safetensors.numpy import save_file

from jaxpaged import LLM, SamplingParams, errors
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.server.grpc_errors import error_from_rpc
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

PROMPT = list(range(3, 43))
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_blocks": 32, "max_num_seqs": 2, "max_num_tokens": 32}


def save_model(folder: Path, seed: int, **changes: Any) -> str:
    folder.mkdir()
    tensors: dict[str, np.ndarray] = dict(random_checkpoint(tiny_config(**changes), seed).tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))
    return str(folder)


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].completions[0].token_ids


def test_new_weights_answer_as_a_fresh_engine_with_them(tmp_path: Path):
    old, new = (save_model(tmp_path / name, seed) for name, seed in (("old", 1), ("new", 2)))
    other = save_model(tmp_path / "other", 3, num_hidden_layers=2)
    with LLM(new, **OPTIONS) as llm:
        expected = tokens_of(llm)
    with LLM(old, **OPTIONS) as llm:
        before = tokens_of(llm)
        assert before != expected
        engine = llm._llm.engine
        with pytest.raises(errors.InvalidFieldError, match="not of the loaded one's structure"):
            engine.update_weights(other).result(60)
        assert tokens_of(llm) == before, "a refused update changed something"
        engine.update_weights(new).result(60)
        assert llm.stats().cached_free_blocks == 0, "KV of the old weights is still cached"
        assert tokens_of(llm) == expected
        assert llm.stats().compiles_after_warmup == 0


def test_what_runs_is_told_and_the_version_is_published(llm: AsyncLLM, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    missing = admin_pb2.UpdateWeightsRequest(checkpoint_path="/no/such/model")
    update = admin_pb2.UpdateWeightsRequest(
        checkpoint_path=str(tmp_path), weights_version=f"v{id(llm)}"
    )

    async def body(service: Service) -> None:
        call = service.stub.Stream(pb.StreamRequest(request=ask([1], 600)))
        while not (await call.read()).HasField("delta"):
            pass
        with pytest.raises(grpc.aio.AioRpcError, match="no model") as caught:
            await service.admin.UpdateWeights(missing)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await call.read()).HasField("delta"), "a failed update ended a request"
        response = await service.admin.UpdateWeights(update)
        assert response.weights_version == update.weights_version
        with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced") as caught:
            while await call.read() is not EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        info = await service.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.weights_version == update.weights_version
        answer = await service.stub.Generate(ask([1], 5))
        assert answer.weights_version == update.weights_version

    run_service(llm, body)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": ' + "[" * 100_000, "is nested too deeply"),
        ("[]", "must hold a JSON object"),
        ('{"refused": 1}', "is truncated"),
    ],
)
def test_a_damaged_checkpoint_is_a_bad_request(
    llm: AsyncLLM, tmp_path: Path, content: str, message: str
):
    (tmp_path / "config.json").write_text(content)
    update = admin_pb2.UpdateWeightsRequest(checkpoint_path=str(tmp_path))

    async def body(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=f"checkpoint_path: .*{message}") as caught:
            await service.admin.UpdateWeights(update)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = error_from_rpc(caught.value)
        assert isinstance(error, errors.InvalidFieldError) and error.field == "checkpoint_path"
        metadata: Any = dict(caught.value.trailing_metadata() or ())
        status = Status.FromString(metadata["grpc-status-details-bin"])
        bad_request = BadRequest()
        assert any(detail.Unpack(bad_request) for detail in status.details)
        assert bad_request.field_violations[0].field == "checkpoint_path"
        assert len((await service.stub.Generate(ask([1], 5))).completions[0].token_ids) == 5

    run_service(llm, body)


def test_a_deadline_that_passes_does_not_hide_the_change(llm: AsyncLLM, tmp_path: Path):
    """The engine is stuck in a step when it is asked, and takes the weights after it."""
    (tmp_path / "config.json").write_text("{}")
    version = f"late {id(llm)}"
    update = admin_pb2.UpdateWeightsRequest(checkpoint_path=str(tmp_path), weights_version=version)

    async def body(service: Service) -> None:
        running = service.stub.Generate(ask([STALL], 600))
        await until_stuck(llm)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.admin.UpdateWeights(update, timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced"):
            await running
        info = await service.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.weights_version == version

    run_service(llm, body)


async def until_stuck(llm: AsyncLLM) -> None:
    """Until the engine does not answer, for it is in a step that stalls."""
    async with asyncio.timeout(20):
        while True:
            try:
                await asyncio.wait_for(llm.stats(), STALL_S / 10)
            except TimeoutError:
                return
