"""Asking a server in JSON over HTTP: a time limit on the whole of an answer, and an error in words for each way to fail."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from topology.errors import RunError
from topology.reading import parse_json

EndpointRole = Literal["server", "reward"]

_MOST_BYTES = 64 << 20
"""Of an answer."""

_MOST_SECONDS = 86_400.0
_FLAGS: dict[EndpointRole, str] = {"server": "--timeout", "reward": "--reward-timeout"}


@dataclass(frozen=True)
class JsonServer:
    """What answers at an address."""

    role: EndpointRole  # what it is for
    url: str
    # host, port, path, query: parts of the address.
    host: str
    port: int
    path: str
    query: str
    is_secure: bool
    timeout_s: float  # most seconds for an answer, its last byte included

    @classmethod
    def at(cls, url: str, role: EndpointRole, timeout_s: float, *, is_local: bool = False) -> Self:
        """Return the server at an address, which is not asked yet.

        Raises RunError if that is no address, or one of another machine where `is_local` asks for this one; or nobody
        waits that long.
        """
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            port = parts.port
        except ValueError:  # a host in half a bracket, a port beyond all
            parts, port = urlsplit(""), None
        if parts.scheme not in ("", "http", "https") or not parts.hostname:
            raise RunError(f"{url!r} is not an http or https URL", hint="such as http://127.0.0.1:8000")
        if is_local and not _is_loopback(parts.hostname):
            raise RunError(
                f"the {role} at {url} is not on this machine",
                hint="use an address such as http://127.0.0.1:PORT/PATH",
            )
        is_secure = parts.scheme == "https"
        query = f"?{parts.query}" if parts.query else ""
        port = port or (443 if is_secure else 80)
        limit_s = checked_limit_s(timeout_s, role)
        return cls(role, url, parts.hostname, port, parts.path, query, is_secure, limit_s)

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"the {self.role} at {self.url}"

    def ask(self, method: str, path: str = "", body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Return the status of an answer, and what it says: a value of JSON, or text where it is none.

        A server that is full (503) and says when to come back is asked again then, while time is left.

        Raises RunError if nothing answers, the whole of it does not arrive in time, or it is too long.
        """
        data = None if body is None else json.dumps(body)
        end = time.monotonic() + self.timeout_s
        while True:
            status, retry_after, raw = self._answer(method, path, data, end)
            if status != HTTPStatus.SERVICE_UNAVAILABLE or not retry_after.isdecimal():
                break
            pause_s = float(retry_after[:9])
            if time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        if len(raw) > _MOST_BYTES:
            raise RunError(f"{self.name} answered with more than {_MOST_BYTES >> 20} MiB")
        return status, read_answer(raw)

    def _answer(self, method: str, path: str, data: str | None, end: float) -> tuple[int, str, bytes]:
        """Return status, ``Retry-After`` and bytes of one answer."""
        connection_of = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        connection = connection_of(self.host, self.port, timeout=self.timeout_s)
        try:
            with self._in_time(connection, path, end):
                connection.request(
                    method, (self.path + path or "/") + self.query, data, {"Content-Type": "application/json"}
                )
                with connection.getresponse() as response:
                    retry_after = response.headers.get("Retry-After", "")
                    return response.status, retry_after, response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise RunError(
                f"cannot reach {self.name}: {error or type(error).__name__}",
                hint="start it, or give another address; tuning and runs with --resume continue from their logs",
            ) from error
        finally:
            connection.close()

    @contextmanager
    def _in_time(self, connection: http.client.HTTPConnection, path: str, end: float) -> Iterator[None]:
        """Connect, and hang up when time is over: what a socket limits is the wait for each byte."""
        is_over = threading.Event()

        def hang_up() -> None:
            is_over.set()
            with suppress(OSError):
                socket.socket.shutdown(reached, socket.SHUT_RDWR)

        timer = None
        try:
            connection.connect()
            reached = connection.sock
            timer = threading.Timer(end - time.monotonic(), hang_up)
            timer.daemon = True
            timer.start()
            yield
        except (OSError, http.client.HTTPException) as error:
            if not is_over.is_set() and not isinstance(error, TimeoutError):
                raise
            is_over.set()
        finally:
            if timer is not None:
                timer.cancel()
        if is_over.is_set():
            raise late(self.role, self.name, self.timeout_s, path)


def read_answer(raw: bytes) -> Any:
    """Return the value of an answer in JSON, nothing where it is empty, or its text where it is no JSON."""
    try:
        return parse_json(raw.decode(), "that is no JSON", RunError) if raw.strip() else {}
    except (RunError, ValueError):
        return raw.decode(errors="replace")


def checked_limit_s(timeout_s: float, role: EndpointRole) -> float:
    """Return a time limit. Raises RunError if nothing can be waited for as long."""
    if not 0 < timeout_s <= _MOST_SECONDS:
        message = f"{_FLAGS[role]} {timeout_s:g} is not a valid time to wait"
        raise RunError(message, hint=f"give seconds above 0, at most {_MOST_SECONDS:g}")
    return timeout_s


def late(role: EndpointRole, name: str, timeout_s: float, path: str = "") -> RunError:
    """Return the error of what has not answered in time."""
    return RunError(
        f"{name} did not answer {path + ' ' if path else ''}within {timeout_s:g} s",
        hint=f"it may be overloaded; wait longer with {_FLAGS[role]}",
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
