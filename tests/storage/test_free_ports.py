"""A port that a server is told of stays free until the server has it."""

from __future__ import annotations

import socket

import pytest

from chaos import free_ports as module
from chaos.free_ports import free_ports
from chaos.s3_server import GRPC_OFFSET


def test_the_kernel_gives_them_to_no_connection() -> None:
    first, _ = map(int, module.EPHEMERAL.read_text().split())
    if first <= module.LOWEST + GRPC_OFFSET + 100:
        pytest.skip(f"this kernel's own ports begin at {first}")
    ports = free_ports(4, GRPC_OFFSET)
    both = {*ports, *(port + GRPC_OFFSET for port in ports)}
    assert len(both) == 8 and all(module.LOWEST <= port < first for port in both)


def test_what_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(module, "LOWEST", taken - 10)
        monkeypatch.setattr(module, "EPHEMERAL", Range(taken - 5, taken + 1))
        for offset in (0, 3):
            with pytest.raises(RuntimeError, match="no 11 free ports"):
                free_ports(11, offset)
        assert taken not in free_ports(1)


class Range:
    """A kernel's range for connections."""

    def __init__(self, first: int, last: int) -> None:
        self._said = f"{first}\t{last}\n"

    def read_text(self) -> str:
        return self._said
