"""What a worker sets in its environment: before any thread of it, as getenv beside setenv ends a
process by SIGSEGV (glibc)."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.core.assignment import Member
from elastic_ft.groups import store_links
from elastic_ft.worker import worker
from tests.multiproc.harness import make_job


class Begun(Exception):
    """A thread was."""


def test_gloos_interface_is_named_before_a_thread_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that was just started ended by SIGSEGV, some times in a day of them."""
    done: list[str] = []
    welcome = SimpleNamespace(job=make_job("ddp"), store=("127.0.0.1", 1), run="run", faults=())
    lifeline = SimpleNamespace(welcome=welcome, own_address="127.0.0.1", cut_off_s=0.0)

    def begins(*_: Any) -> None:
        done.append("a thread")
        raise Begun

    monkeypatch.setattr(worker, "Lifeline", lambda *_: lifeline)
    monkeypatch.setattr(worker, "use_interface_of", done.append)
    monkeypatch.setattr(worker, "set_nccls_defaults", lambda: done.append("NCCL"))
    monkeypatch.setattr(store_links.StoreLinks, "prepare", begins)
    key: Any = SimpleNamespace(secret=b"secret")
    with pytest.raises(Begun):
        worker.Worker(("127.0.0.1", 1), key, Member("w0", "n0", "localhost", 1), None)
    assert done == ["127.0.0.1", "NCCL", "a thread"]


def test_what_a_seat_sets_has_its_place_before_a_thread_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Ray a worker's rank is set as each generation forms, beside threads that look names up. A
    new name moves the environment, another value of a known one does not. Python sees none yet:
    libraries take a rank for a world that was launched."""
    from elastic_ft.hosts.ray import worker_actor

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    names = [*worker_actor.ALONE, "NCCL_HOSTID"]
    found: dict[str, bytes | None] = {}

    def begins(**_: Any) -> None:
        found.update((name, libc.getenv(name.encode())) for name in names)
        raise Begun

    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_actor, "_own_gpu", lambda worker: {"NCCL_HOSTID": worker})
    monkeypatch.setattr(worker_actor.threading, "Thread", begins)
    try:
        with pytest.raises(Begun):
            worker_actor.ElasticWorker()
        assert all(found.values()), found
        assert not [name for name in names if name in os.environ]
    finally:
        for name in names:
            os.unsetenv(name)
