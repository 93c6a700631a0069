"""The network edge, byte by byte: what is half sent, doubtful, too large or too much."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from serving_support import PATIENCE, SMALL, Server, is_alive, until

from lopa.cli.main import main

LIMITS = ("--request-seconds", "1", "--max-connections", "8", "--health-seconds", "1")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hello", "max_tokens": 1}'
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def edge(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A request may take a second to arrive, and there are eight connections."""
    with Server("--model", str(chat_folder), *SMALL, *LIMITS) as server:
        server.http.close()
        yield server
        assert server.noise == []
        assert not [line for line in server.lines if line["level"] == "error"]


def connect(server: Server) -> socket.socket:
    host, port = server.url.split("//")[1].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def exchange(server: Server, *parts: bytes) -> bytes:
    """All that the server sends until it closes; a reset is an error."""
    with connect(server) as end:
        for part in parts:
            end.sendall(part)
        return read(end)


def read(end: socket.socket) -> bytes:
    found = b""
    while part := end.recv(65536):
        found += part
    return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def answers(answer: bytes) -> int:
    return answer.count(b"HTTP/1.1 ")


def works(server: Server) -> bool:
    length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    return status(exchange(server, POST, length, BODY)) == 200


def test_half_a_request_has_its_time(edge: Server) -> None:
    halves = (
        b"GET /health HTTP/1.1\r\nHost: loc",
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        GET + b"GET /health HTTP/1.1\r\nHost: loc",
    )
    with ExitStack() as stack:
        ends = [stack.enter_context(connect(edge)) for _ in halves]
        for end, sent in zip(ends, halves, strict=True):
            end.sendall(sent)
        found = [read(end) for end in ends]
    assert status(found[-1]) == 200
    found[-1] = found[-1][found[-1].index(b"HTTP/1.1 ", 1) :]
    for answer in found:
        assert status(answer) == 408
        assert b"Connection: close" in answer
        body = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        assert "longer than 1 seconds" in body["error"]["message"]


def test_bytes_one_by_one_do_not_extend_it(edge: Server) -> None:
    with connect(edge) as end:
        began = time.monotonic()
        try:
            for byte in POST * 100:
                end.sendall(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - began < PATIENCE
        except ConnectionError:
            return
    pytest.fail("it was never closed")


def test_a_connection_that_says_nothing_is_closed(edge: Server) -> None:
    assert exchange(edge) == b""


def test_many_half_requests_keep_nobody_out(edge: Server) -> None:
    """Each new connection takes the place of the one that has waited longest."""
    with ExitStack() as stack:
        for number in range(200):
            end = stack.enter_context(connect(edge))
            end.sendall(
                b"GET / HTTP/1.1\r\n" if number % 2 else POST + b"Content-Length: 9\r\n\r\n{"
            )
            if number % 20 == 0:
                assert works(edge)
        assert works(edge)
        descriptors = len(os.listdir(f"/proc/{edge.process.pid}/fd"))
        assert descriptors < 60
    until(lambda: works(edge), edge)


def test_more_connections_than_there_may_be(edge: Server) -> None:
    """Where all of them are in use the next is told so."""
    long = json.dumps({"prompt": "Hello", "max_tokens": 400, "stream": True}).encode()
    length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(long)
    os.kill(edge.engine_pid, signal.SIGSTOP)
    try:
        with ExitStack() as stack:
            held = [stack.enter_context(connect(edge)) for _ in range(8)]
            for end in held:
                end.sendall(POST + length + long)
            answer = until(lambda: exchange(edge, GET))
            assert status(answer) == 503
            assert b"Retry-After: 1" in answer
            assert b"too many connections" in answer
    finally:
        os.kill(edge.engine_pid, signal.SIGCONT)
    until(lambda: works(edge), edge)


def test_a_response_reaches_a_client_that_is_still_sending(edge: Server) -> None:
    """The connection is not reset before all of the body is sent."""
    large = b"x" * 20_000_000
    for more in (b"", b"Connection: close\r\n"):
        head = POST + more + b"Content-Length: %d\r\n\r\n" % len(large)
        answer = exchange(edge, head, large)
        assert (status(answer), answers(answer)) == (413, 1)
        assert b"connection: close" in answer.lower()
    chunks = b"".join(b"%x\r\n%s\r\n" % (100_000, large[:100_000]) for _ in range(100))
    answer = exchange(edge, POST, b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert (status(answer), answers(answer)) == (413, 1)
    # Other refusals too, here of the path.
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    answer = exchange(edge, head, large[:1_000_000], GET)
    assert (status(answer), answers(answer)) == (404, 1)


def test_chunks_that_are_too_small(edge: Server) -> None:
    """A million of them would take the server tens of seconds."""
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = exchange(edge, head, b"1\r\nx\r\n" * 3000)
    assert (status(answer), answers(answer)) == (400, 1)
    assert b"too small" in answer
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    answer = exchange(edge, head.replace(b"Transfer", b"Connection: close\r\nTransfer"), small)
    assert status(answer) == 200


def test_a_client_that_does_not_read_is_disconnected(edge: Server) -> None:
    ask = b"GET /playground/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(edge) as end:
        end.setblocking(False)

        def gone() -> bool:
            try:
                end.send(ask * 100)
            except BlockingIOError:  # it has stopped to read, too
                return False
            except ConnectionError:
                return True
            return False

        until(gone)
    assert works(edge)


def test_a_refused_body_is_not_waited_for(edge: Server) -> None:
    answer = exchange(edge, POST + b"Content-Length: 20000000\r\n\r\nx")
    assert (status(answer), answers(answer)) == (413, 1)
    answer = exchange(edge, POST + b"Expect: 100-continue\r\nContent-Length: 20000000\r\n\r\n")
    assert (status(answer), answers(answer)) == (413, 1)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 5\r\n", b"Content-Length: 100\r\n"])
def test_a_body_whose_length_is_in_doubt(edge: Server, version: bytes, length: bytes) -> None:
    """What follows it may be meant as a request of somebody else: it is not answered."""
    head = POST.replace(b"1.1", version) + length + b"Transfer-Encoding: chunked\r\n\r\n"
    if version == b"1.1" and not length:
        return  # there is no doubt
    answer = exchange(edge, head + b"0\r\n\r\n" + GET)
    assert (status(answer), answers(answer)) == (400, 1)
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("name", [b"Host: evil.example", b"Host: localhost\r\nOrigin: http://evil"])
@pytest.mark.parametrize("path", [b"/health", b"/", b"/playground/info", b"/v1/models", b"/slots"])
def test_pages_of_other_sites(edge: Server, name: bytes, path: bytes) -> None:
    answer = exchange(
        edge, b"GET " + path + b" HTTP/1.1\r\n" + name + b"\r\nConnection: close\r\n\r\n"
    )
    assert status(answer) == 403


def test_health_of_a_stopped_engine(edge: Server) -> None:
    def health(deep: str = "") -> httpx.Response:
        return httpx.get(f"{edge.url}/health{deep}", timeout=60)

    assert health("?deep=1").json() == {"live": True, "ready": True, "state": "ready"}
    os.kill(edge.engine_pid, signal.SIGSTOP)
    try:
        until(lambda: health("?deep=1").status_code == 503)
        until(lambda: health().status_code == 503)
        assert health().json() == {"live": True, "ready": False, "state": "unresponsive"}
        assert httpx.get(f"{edge.url}/health/live").status_code == 200
    finally:
        os.kill(edge.engine_pid, signal.SIGCONT)
    until(lambda: health("?deep=1").status_code == 200)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key in one file, of localhost and for a client alike."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    names = [str(folder / "key"), str(folder / "certificate")]
    subprocess.run(
        [*command, "-keyout", names[0], "-out", names[1]], check=True, capture_output=True
    )
    both = folder / "both.pem"
    both.write_text("".join(Path(name).read_text() for name in names))
    return both


@pytest.mark.soak
def test_tls_and_a_key_file(chat_folder: Path, certificate: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-1\nsecret-2\n")
    options = ["--ssl-certfile", str(certificate), "--ssl-ca-certs", str(certificate)]
    options += ["--api-key-file", str(keys), "--request-seconds", "1"]
    server = Server("--model", str(chat_folder), *options, wait=False)
    with server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        trusted.load_cert_chain(certificate)
        with httpx.Client(base_url=server.url, verify=trusted) as client:
            until(lambda: client.get("/health").status_code == 200, server)
            for key, expected in (("secret-1", 200), ("secret-2", 200), ("# ours", 401)):
                found = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                assert found.status_code == expected
        stranger = ssl.create_default_context(cafile=str(certificate))
        with (
            httpx.Client(base_url=server.url, verify=stranger) as client,
            pytest.raises(httpx.TransportError),  # it shows no certificate
        ):
            client.get("/health")
        # No TLS at all, and a handshake that does not go on.
        assert b"HTTP" not in exchange_or_reset(server, GET)
        assert exchange_or_reset(server) == b""


def exchange_or_reset(server: Server, *parts: bytes) -> bytes:
    try:
        return exchange(server, *parts)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ssl-certfile", "/nonexistent"], "the TLS certificate cannot be used"),
        (["--ssl-keyfile", "/nonexistent"], "go with ssl_certfile"),
        (["--api-key-file", "/nonexistent"], "cannot be read"),
        (["--max-connections", "0"], "at least 1"),
        (["--request-seconds", "0"], "above 0"),
        (["--replicas", "1", "--max-connections", "5"], "does not go with --replicas"),
    ],
)
def test_wrong_options(options: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *options]) == 2
    assert words in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.soak
def test_a_stopped_engine_does_not_outlive_its_parent(chat_folder: Path) -> None:
    server = Server("--model", str(chat_folder))
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    until(lambda: not is_alive(engine))
    server.stop()
