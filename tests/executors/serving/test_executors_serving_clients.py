"""What clients of every sort may do to a server: crowds, hostile bytes, silence, and leaving."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from costmodel.models.configs import LoRA
from executors.models.lora import save_adapters
from executors.runs.adapters import attach
from executors.serving.client import RemoteServer
from executors.serving.runner import Request
from executors.serving.runtime import Runtime
from executors.serving.server import ClientLimits, ScoringServer
from tests.support.command import saved_model, zosim
from tests.support.serving import serving
from tests.support.tiny import model_of
from tests.support.waiting import HANG_S, wait_until

SCORING = {"model": "base", "prompt": [[5, 4, 7]], "max_tokens": 0, "echo": True, "logprobs": 0}


@pytest.fixture(scope="module")
def runtime():
    return Runtime(model_of("opt", num_hidden_layers=1))


class Gate:
    """A runtime whose forwards wait until they are let through."""

    def __init__(self, runtime):
        self.runtime, self.is_open, self.began = runtime, threading.Event(), threading.Event()
        self.sizes = []  # how many requests each forward had

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def score(self, requests):
        self.sizes.append(len(requests))
        self.began.set()
        assert self.is_open.wait(HANG_S)
        return self.runtime.score(requests)


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)


def post(body, path="/v1/completions", **headers):
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(data)} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def answer(connection):
    """Status, headers and body of an answer; (0, {}, b"") where the server has hung up."""
    with connection.makefile("rb") as stream:
        status = stream.readline().split()
        if not status:
            return 0, {}, b""
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        length = headers.get("content-length")
        return int(status[1]), headers, stream.read() if length is None else stream.read(int(length))


def answered(server, sent):
    with connected(server) as connection:
        connection.sendall(sent)
        return answer(connection)


def is_hung_up(connection):
    """Wait until the server has closed a connection, and say how."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


# -- crowds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [8, 256])
def test_of_a_crowd_everybody_is_answered_or_asked_to_come_back(runtime, most, capfd):
    gate = Gate(runtime)
    with serving(gate, limits=ClientLimits(requests=most)) as server:
        crowd = [connected(server) for _ in range(200)]
        for connection in crowd:
            connection.sendall(post(SCORING))
        assert gate.began.wait(HANG_S)
        with ThreadPoolExecutor(len(crowd)) as pool:
            answers = pool.map(answer, crowd)
            wait_until(lambda: server.batcher._number == min(most, len(crowd)), "requests that wait")
            gate.is_open.set()
            first = list(answers)
        for connection in crowd:
            connection.close()
    statuses = [status for status, _, _ in first]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= min(most, len(crowd))
    if most >= len(crowd):
        assert statuses.count(503) == 0
    for status, headers, body in first:
        if status == 503:
            assert headers["retry-after"] == "1"
            assert "requests are waiting or running" in json.loads(body)["error"]["message"]
    assert capfd.readouterr().err == ""


def test_whoever_is_asked_to_come_back_does(runtime):
    gate = Gate(runtime)
    with serving(gate, limits=ClientLimits(requests=1)) as server:
        runners = [RemoteServer(server.url) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(runners[0].score, [Request((5, 4, 7))])
            assert gate.began.wait(HANG_S)
            assert answered(server, post(SCORING))[0] == 503
            second = pool.submit(runners[1].score, [Request((5, 4, 7))])
            gate.is_open.set()
            assert first.result() == second.result()


def test_the_oldest_idle_connection_makes_room(runtime):
    with serving(runtime, limits=ClientLimits(connections=4)) as server:
        idle = [connected(server) for _ in range(4)]
        wait_until(lambda: len(server._loop.server_state.connections) == 4, "four connections")
        assert answered(server, post(SCORING))[0] == 200
        assert is_hung_up(idle[0])
        idle[3].sendall(post(SCORING))
        assert answer(idle[3])[0] == 200
        for connection in idle:
            connection.close()


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["page.example", "127.0.0.1.page.example", "localhost.page.example:80", "[", ""]
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
def test_names_that_were_made_to_lead_here_are_refused(runtime, host, path):
    with serving(runtime) as server:
        status, _, body = answered(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status == 400
    assert b"base" not in body


HOSTILE = {
    "digits": (post(b"{}", Content_Length="9" * 5000), 400),
    "negative": (post(b"{}", Content_Length="-1"), 400),
    "words": (post(b"{}", Content_Length="many"), 400),
    "huge": (post(b"{}", Content_Length=10**15), 413),
    "two-lengths": (post(b"{}", content_length="3", Content_Length="2"), 400),
    "chunked": (
        post(b"", Content_Length=None, Transfer_Encoding="chunked")
        + b"20000\r\n"
        + b" " * 0x20000
        + b"\r\n0\r\n\r\n",
        413,
    ),
    "no-http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "long-head": (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000, 400),
    "no-host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "deep": (post(b"[" * 9000), 400),
    "nan": (post(b'{"model": "base", "prompt": [[NaN]]}'), 400),
    "integer": (post(b'{"model": "base", "prompt": [[' + b"9" * 5000 + b"]]}"), 400),
    "surrogate": (post(b'{"model": "\\ud800", "prompt": [[5]]}'), 400),
    "bytes": (post(b"\xff\xfe"), 400),
    "nobody": (post(b'{"model": "\\u001b[31m", "prompt": [[5]]}'), 404),
    "text": (post(SCORING | {"prompt": "It was"}), 400),
    "token": (post(SCORING | {"prompt": [[5, 10**9]]}), 400),
    "several": (post({"model": "base", "prompt": [[5]], "n": 5}), 400),
    "stream": (post({"model": "base", "prompt": [[5]], "stream": True}), 400),
    "stop": (post(SCORING | {"stop": ["."]}), 400),
    "long": (post({"model": "base", "prompt": [[5] * 65]}), 400),
    "form": (post(b"a=b", Content_Type="application/x-www-form-urlencoded"), 415),
    "path": (post(b"{}", "/v1/" + "a" * 3000), 404),
    "method": (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "zero": (post(b'{"lora_name": "a", "lora_path": "\\u0000"}', "/v1/load_lora_adapter"), 400),
}


def test_a_text_says_what_ended_it(runtime, monkeypatch):
    request = {
        "model": "base",
        "prompt": [[5, 4], [7] * 31],
        "max_tokens": 3,
        "n": 1,
        "stream": False,
        "user": "me",
    }
    with serving(runtime) as server:
        status, _, body = answered(server, post(request))
        assert status == 200, body
        choices = json.loads(body)["choices"]
        assert [(len(one["token_ids"]), one["finish_reason"]) for one in choices] == [
            (3, "length"),
            (1, "length"),
        ]
        monkeypatch.setattr(runtime, "stop_tokens", (choices[0]["token_ids"][1],))
        [ended] = json.loads(answered(server, post(request | {"prompt": [[5, 4]]}))[2])["choices"]
        assert ended["finish_reason"] == "stop"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_without_a_traceback(runtime, name, capfd):
    sent, status = HOSTILE[name]
    with serving(runtime, limits=ClientLimits(body_bytes=1 << 16)) as server:
        refused, _, body = answered(server, sent)
        assert refused == status
        assert answered(server, post(SCORING))[0] == 200
    assert name != "text" or b"lists of token ids" in body
    assert capfd.readouterr().err == ""


def test_bodies_together_are_bounded(runtime):
    with serving(runtime, limits=ClientLimits(body_bytes=1 << 20, held_bytes=1 << 20)) as server:
        with connected(server) as slow:
            slow.sendall(post(b" " * (1 << 20))[:-1])
            wait_until(
                lambda: server._application.num_held_bytes == (1 << 20) - 1, "a body that is nearly there"
            )
            assert answered(server, post(b" " * 2))[0] == 503
        wait_until(lambda: server._application.num_held_bytes == 0, "the room of a client that has left")
        assert answered(server, post(SCORING))[0] == 200


@pytest.mark.parametrize("part", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_a_pipe_holds_up_nobody(runtime, tmp_path, part):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]})
    )
    (tmp_path / part).unlink(missing_ok=True)
    os.mkfifo(tmp_path / part)
    with serving(runtime) as server:
        loading = post({"lora_name": "a", "lora_path": str(tmp_path)}, "/v1/load_lora_adapter")
        status, _, body = answered(server, loading)
        assert status == 400
        assert part in json.loads(body)["error"]["message"]


def test_more_adapters_than_are_kept_are_refused_until_one_is_unloaded(tmp_path):
    model = model_of("opt", num_hidden_layers=1)
    attach(model, LoRA(rank=2, target_modules=("q_proj",), seed=0))
    save_adapters(model, tmp_path)

    def call(verb, name):
        body = {"lora_name": name, "lora_path": str(tmp_path)}
        status, _, answer = answered(server, post(body, f"/v1/{verb}_lora_adapter"))
        return status, json.loads(answer)

    with serving(Runtime(model_of("opt", num_hidden_layers=1)), limits=ClientLimits(adapters=1)) as server:
        assert call("load", "first")[0] == 200
        status, answer = call("load", "second")
        assert status == 400
        assert "would be adapter 2, but this server holds at most 1" in answer["error"]["message"]
        assert call("load", "first")[0] == 200
        assert call("unload", "first")[0] == 200
        assert call("load", "second")[0] == 200


# -- silence -------------------------------------------------------------------------------------------------------

SOON = ClientLimits(head_s=0.2, idle_s=0.2, body_s=0.2, write_s=0.2)


@pytest.mark.parametrize("sent", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_connections_that_say_nothing_are_closed(runtime, sent, capfd):
    with serving(runtime, limits=SOON) as server, connected(server) as connection:
        connection.sendall(sent)
        assert is_hung_up(connection)
    assert capfd.readouterr().err == ""


def test_a_head_that_drips_is_not_waited_for(runtime):
    with (
        serving(runtime, limits=SOON) as server,
        connected(server) as connection,
        pytest.raises(ConnectionError),
    ):
        wait_until(lambda: connection.send(b"G") == 0, "a closed connection")


def test_an_idle_connection_is_closed_after_its_answer(runtime):
    with serving(runtime, limits=SOON) as server, connected(server) as connection:
        connection.sendall(post(SCORING))
        assert answer(connection)[0] == 200
        assert is_hung_up(connection)


def test_a_body_that_does_not_come_is_answered(runtime):
    with serving(runtime, limits=SOON) as server:
        status, _, body = answered(server, post(b"{}", Content_Length=9))
    assert (status, json.loads(body)["error"]["message"]) == (408, "the body did not arrive within 0.2 s")


def test_an_answer_that_nobody_reads_is_not_kept(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "score", lambda requests: [[-1.5]] * len(requests))
    with serving(runtime, limits=SOON) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(SCORING | {"prompt": [[5, 4]] * 100_000}))
        state = server._loop.server_state
        wait_until(lambda: state.connections, "a connection")
        wait_until(lambda: not state.connections, "a connection that is cut")


# -- leaving -------------------------------------------------------------------------------------------------------


def test_what_a_client_that_left_was_waiting_for_is_not_computed(runtime, capfd):
    gate = Gate(runtime)
    with serving(gate) as server:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(answered, server, post(SCORING))
            assert gate.began.wait(HANG_S)
            leaving = [connected(server) for _ in range(20)]
            for connection in leaving:
                connection.sendall(post(SCORING))
            wait_until(lambda: server.batcher._number == 21, "requests that wait")
            for connection in leaving:
                connection.close()
            wait_until(
                lambda: all(entry.answers.cancelled() for entry in server.batcher._waiting),
                "clients that left",
            )
            gate.is_open.set()
            assert first.result()[0] == 200
        assert answered(server, post(SCORING))[0] == 200
    assert len(gate.sizes) == 2
    assert capfd.readouterr().err == ""


def test_a_long_request_is_answered_forward_by_forward(runtime, monkeypatch):
    """Others are answered between its forwards, and none runs once its client has left."""
    monkeypatch.setattr("executors.serving.runtime._MAX_TOKENS", 6)
    gate = Gate(runtime)
    long = SCORING | {"prompt": [[5, 4, 7]] * 8}
    with serving(gate) as server, ThreadPoolExecutor(2) as pool:
        with connected(server) as leaving:
            leaving.sendall(post(long))
            assert gate.began.wait(HANG_S)
            staying, short = (pool.submit(answered, server, post(sent)) for sent in (long, SCORING))
            wait_until(lambda: server.batcher._number == 3, "requests that wait")
        wait_until(lambda: server._application._num_requests == 2, "a client that left")
        gate.is_open.set()
        assert short.result()[0] == 200
        assert len(json.loads(staying.result()[2])["choices"]) == 8
    assert gate.sizes in ([2, 2, 1, 2, 2, 2], [2, 1, 2, 2, 2, 2])


def test_an_answer_that_takes_too_long_is_refused(runtime):
    gate = Gate(runtime)
    with serving(gate, limits=ClientLimits(answer_s=0.2)) as server:
        status, _, body = answered(server, post(SCORING))
        gate.is_open.set()
    assert (status, json.loads(body)["error"]["message"]) == (503, "no answer within 0.2 s")


@contextmanager
def ending(server):
    """Serve on a thread, and tell the server to end at the end of the block."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield
    server._loop.should_exit = True
    thread.join()


def test_requests_at_hand_are_answered_before_a_server_ends(runtime):
    gate = Gate(runtime)
    with ScoringServer(gate, "base") as server, ThreadPoolExecutor(1) as pool:
        with ending(server):
            waiting = pool.submit(answered, server, post(SCORING))
            assert gate.began.wait(HANG_S)
            threading.Timer(0.3, gate.is_open.set).start()
        assert waiting.result()[0] == 200
        with pytest.raises(ConnectionRefusedError):
            connected(server)


def test_requests_that_outlast_the_grace_are_refused(runtime, capfd):
    gate = Gate(runtime)
    with (
        ScoringServer(gate, "base", limits=ClientLimits(grace_s=0.2)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with ending(server), connected(server):
            waiting = pool.submit(answered, server, post(SCORING))
            assert gate.began.wait(HANG_S)
        status, _, body = waiting.result()
        assert (status, json.loads(body)["error"]["message"]) == (503, "the server has ended")
        gate.is_open.set()
    assert capfd.readouterr().err == ""


def test_a_line_for_each_request_holds_nothing_of_it(runtime):
    lines = []
    with serving(runtime, log=lines.append) as server:
        answered(server, post(SCORING, "/v1/completions?secret=words"))
        answered(server, post(SCORING | {"model": "secret"}))
        answered(server, post(SCORING, Host="page.example"))
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines] == [
        "POST /v1/completions 200",
        "POST /v1/completions 404",
        "POST /v1/completions 400",
    ]
    assert all(line.endswith(" ms") for line in lines)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_what_is_not_installed_is_named(monkeypatch, capsys, tmp_path, package):
    monkeypatch.delitem(sys.modules, "executors.serving.server", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert zosim("serve", "--model", tmp_path) == 2
    err = capsys.readouterr().err
    assert f"needs {package}, which is not installed" in err
    assert "pip install -e '.[serve]'" in err


@pytest.mark.crossed(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_in_order(tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "zosim",
        "serve",
        "--model",
        saved_model("opt", tmp_path),
        "--name",
        "base",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served:
        line = next(line for line in served.stderr if line.startswith("serving base at "))
        assert RemoteServer(line.split()[-1]).adapters() == ()
        served.send_signal(number)
        rest = served.stderr.read()
    assert served.returncode == 0
    assert rest.endswith("ended\n")
    assert "GET /v1/models 200" in rest
    assert "Traceback" not in rest
