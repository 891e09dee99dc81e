"""Who may connect, who may call, and what a server refuses to start with."""

import asyncio
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.fake_async_llm import ANSWER, FakeAsyncLLM
from helpers.running_server import Running, with_server

from jaxpaged import errors
from jaxpaged.client import AsyncClient, Client
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.server.security import Tokens, check_clear_tokens, server_credentials

CODE = grpc.StatusCode
USER, ADMIN = "user-token-1", "admin-token-1"


@pytest.fixture
def token_files(tmp_path: Path) -> dict[str, Any]:
    files = {"token_file": f"\n{USER}\nuser-token-2\n", "admin_token_file": f"{ADMIN}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in files}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and a server's and a client's certificate that it has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA")
    for name in ("server", "client"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.csr"]
        openssl("req", *new[:-2], *files, "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signer, "-days", "2")
    return folder


def test_every_call_but_health_needs_a_token(token_files: dict[str, Any]):
    async def outcome(stub_call: Any, token: str | None) -> grpc.StatusCode:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            await asyncio.wait_for(stub_call(b"", metadata=metadata), 10)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return CODE.OK

    async def body(running: Running) -> None:
        info = "/jaxpaged.v1.InferenceService/GetModelInfo"
        stats = "/jaxpaged.v1.AdminService/GetStats"
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        health = "/grpc.health.v1.Health/Check"
        for channel, method, token, expected in (
            (running.channel, info, None, CODE.UNAUTHENTICATED),
            (running.channel, info, "wrong", CODE.UNAUTHENTICATED),
            (running.channel, info, USER, CODE.OK),
            (running.channel, info, "user-token-2", CODE.OK),
            (running.channel, info, ADMIN, CODE.OK),
            (running.channel, "/no.such/Method", None, CODE.UNAUTHENTICATED),
            (running.channel, "/no.such/Method", USER, CODE.UNIMPLEMENTED),
            (running.channel, reflection, None, CODE.UNAUTHENTICATED),
            (running.channel, health, None, CODE.OK),
            (running.admin_channel, health, None, CODE.OK),
            (running.admin_channel, stats, None, CODE.UNAUTHENTICATED),
            (running.admin_channel, stats, USER, CODE.PERMISSION_DENIED),
            (running.admin_channel, stats, ADMIN, CODE.OK),
        ):
            assert await outcome(channel.unary_unary(method), token) is expected, (method, token)

    with_server(body, **token_files)


def test_refusals_are_counted_and_logged(
    token_files: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    async def body(running: Running) -> None:
        for token, reason in (("wrong secret", "BAD_TOKEN"), (USER, "ADMIN_ONLY")):
            async with AsyncClient(running.address, running.admin_address, token=token) as client:
                with pytest.raises(errors.JaxpagedError):
                    await client.stats()
            registry = running.server._metrics.registry
            name = "jaxpaged_request_rejections_total"
            assert registry.get_sample_value(name, {"reason": reason}) == 1
            assert f"'/jaxpaged.v1.AdminService/GetStats' refused: {reason}" in caplog.text

    with caplog.at_level(logging.INFO, logger="jaxpaged"):
        with_server(body, **token_files)
    assert "secret" not in caplog.text and USER not in caplog.text


def test_the_client_sends_its_token_and_gets_our_errors(token_files: dict[str, Any]):
    async def body(running: Running) -> None:
        async with AsyncClient(running.address, running.admin_address, token=USER) as client:
            assert [delta.text async for delta in client.stream("x")] == ANSWER
            assert await client.tokenizer.encode("h") == [0, 104]
            with pytest.raises(errors.AdminOnlyError):
                await client.stats()
        async with AsyncClient(running.address, token="wrong") as client:
            with pytest.raises(errors.BadTokenError):
                await client.generate("x")

    with_server(body, **token_files)


def test_tokens_in_clear_text_stay_on_loopback(token_files: dict[str, Any]):
    for host in ("127.0.0.1", "localhost", "::1"):
        check_clear_tokens(ServerConfig(host=host, **token_files))
    for changes, name in (
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "example.org"}, "host"),
        ({"admin_host": "::"}, "admin_host"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}=.*clear text"):
            Server(ServerConfig(**changes, **token_files))
        check_clear_tokens(ServerConfig(**changes, **token_files, allow_clear_tokens=True))
        check_clear_tokens(ServerConfig(**changes, **token_files, tls_cert="c", tls_key="k"))
    check_clear_tokens(ServerConfig(host="0.0.0.0"))
    with pytest.raises(ValueError, match="admin_token_file"):
        check_clear_tokens(ServerConfig(token_file="x"))


def test_files_that_cannot_be_used_are_one_clear_line(tmp_path: Path):
    (tmp_path / "empty").write_text("\n \n")
    empty, missing = str(tmp_path / "empty"), str(tmp_path / "missing")
    ports: dict[str, Any] = {"port": 0, "admin_port": 0}
    with pytest.raises(ValueError, match="is empty"):
        Server(ServerConfig(**ports, admin_token_file=empty))
    with pytest.raises(OSError, match="missing"):
        Server(ServerConfig(**ports, admin_token_file=missing))
    with pytest.raises(ValueError, match="tls_cert needs"):
        Server(ServerConfig(**ports, tls_cert=empty))

    async def start() -> None:
        Server(ServerConfig(**ports, tls_cert=empty, tls_key=empty))

    with pytest.raises(OSError, match="cannot listen"):
        asyncio.run(start())


@pytest.mark.parametrize("content", [b"", b"# none\n", b"\xff\xfe", "a key"])
def test_a_client_ca_without_a_certificate_is_refused(
    tmp_path: Path, certificates: Path, content: bytes | str
):
    """Else everybody would be let in."""
    pair = {"tls_cert": "server.pem", "tls_key": "server.key"}
    files: dict[str, Any] = {name: str(certificates / file) for name, file in pair.items()}
    if isinstance(content, str):
        content = (certificates / "client.key").read_bytes()
    file = tmp_path / "ca"
    file.write_bytes(content)
    config = ServerConfig(port=0, admin_port=0, tls_client_ca=str(file), **files)
    with pytest.raises(ValueError, match=r"tls_client_ca='.*ca' must hold a PEM certificate"):
        server_credentials(config)
    file.write_bytes("# 주석\n".encode() + (certificates / "ca.pem").read_bytes())
    assert server_credentials(config) is not None


def test_a_token_is_a_users_or_an_operators(tmp_path: Path, token_files: dict[str, Any]):
    (tmp_path / "token_file").write_text(f"{USER}\n {ADMIN}\n")
    with pytest.raises(ValueError, match="have a token in common"):
        Server(ServerConfig(port=0, admin_port=0, **token_files))


def test_the_encoding_of_token_files(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_bytes(b"\xef\xbb\xbfabc\r\nxyz\r\n")
    tokens = Tokens(str(file))
    assert "abc" in tokens and "xyz" in tokens and "\ufeffabc" not in tokens
    file.write_bytes(b"\xff\xfea\0b\0")
    with pytest.raises(ValueError, match=f"the token file {file} is not UTF-8"):
        Tokens(str(file))


@pytest.mark.parametrize("is_mutual", [False, True])
def test_tls(certificates: Path, token_files: dict[str, Any], is_mutual: bool):
    files = {name: str(certificates / name) for name in ("ca.pem", "client.pem", "client.key")}

    async def body() -> None:
        config = ServerConfig(
            port=0,
            admin_port=0,
            tls_cert=str(certificates / "server.pem"),
            tls_key=str(certificates / "server.key"),
            tls_client_ca=files["ca.pem"] if is_mutual else None,
            stop_grace_s=0.1,
            **token_files,
        )
        server, llm = Server(config), FakeAsyncLLM()
        await server.start()
        fake: Any = llm
        await server.set_ready(fake)
        address, admin = (f"127.0.0.1:{port}" for port in (server.port, server.admin_port))
        own = {"tls_cert": files["client.pem"], "tls_key": files["client.key"]}
        common: dict[str, Any] = {"tls": True, "token": ADMIN, "timeout_s": 10, "retries": False}
        trusted = common | {"tls_ca": files["ca.pem"]} | (own if is_mutual else {})
        async with AsyncClient(address, admin, **trusted) as client:
            assert [delta.text async for delta in client.stream("x")] == ANSWER
            assert await client.stats()
        strangers = [common, {"token": ADMIN, "timeout_s": 10, "retries": False}]
        if is_mutual:
            strangers.append(common | {"tls_ca": files["ca.pem"]})
        for options in strangers:
            async with AsyncClient(address, **options) as client:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.generate("x")
                assert caught.value.code() is CODE.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            if not is_mutual:
                assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        await server.stop()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_client_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="need tls=True"):
        Client("a:1", tls_ca="x")
    with pytest.raises(ValueError, match="belong together"):
        Client("a:1", tls=True, tls_key="x")
