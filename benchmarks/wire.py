"""Messages between processes: what the typed, sealed ones cost beside pickles.

    python benchmarks/wire.py [--tls]

Two processes of this machine. The first side is what ``multiprocessing.connection`` does (an HMAC
when it connects, then pickles), which anybody in between could change, and which runs whatever is
in a pickle. ``round_trips_per_s``: a message there and the same back. ``one_way_per_s``: many, then
one answer, as a worker's steps go. Both sides are measured in turn, several times; the best counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import pickle
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.keeper.protocol import Content
from elastic_ft.transport import wire
from elastic_ft.transport.control import TO_CONTROLLER, TO_WORKER, Heartbeat, forms
from elastic_ft.transport.messages import Messages, encode
from elastic_ft.transport.reception import Reception
from elastic_ft.transport.tls import JobKey, new_key

KEYS = {"sealed": JobKey(b"k" * 32)}  # by side
HELD = ev.StepHeld(1.7e9, "w12", 3, 800)
BEAT = Heartbeat("w12", 800, 12, 9876, "after_backward")
APPLIED = ev.StepApplied(
    1.7e9,
    "w12",
    3,
    800,
    {
        "loss": 2.345,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 8192,
        "step_time_s": 0.25,
        "applied_at_s": 1.7e9,
    },
    pace_s=0.2,
    took_s=0.25,
    spent={"data_s": 0.001, "save_s": 0.002},
)
ALL = Messages(Heartbeat, ev.StepHeld, ev.StepApplied, Content, bytes_max=1 << 30)
END = Heartbeat("", 0, 0, 0, "")


class Pickles:
    """One end of a connection as it was."""

    def __init__(self, connection: Any) -> None:
        self.send, self.receive = connection.send, connection.recv


def echo_pickles(pipe: Any) -> None:
    with multiprocessing.connection.Listener(
        ("127.0.0.1", 0), authkey=KEYS["sealed"].secret
    ) as listener:
        pipe.send(listener.address)
        with listener.accept() as connection:
            echo(Pickles(connection))


def echo_sealed(pipe: Any, key: JobKey) -> None:
    reception = Reception("echo", "127.0.0.1", key, ALL, echo)
    reception.start()
    pipe.send(("127.0.0.1", reception.port))
    pipe.recv()


def echo(end: Any) -> None:
    """Each message back; those after an END only once another END comes."""
    quiet = False
    try:
        while True:
            message = end.receive()
            quiet = quiet is not (message == END)
            if not quiet or message == END:
                end.send(message)
    except EOFError:
        return


def measure(end: Any, message: Any, seconds: float) -> dict[str, float]:
    trips, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        end.send(message)
        end.receive()
        trips += 1
    found = {"round_trips_per_s": trips / (time.perf_counter() - began)}
    end.send(END)
    end.receive()
    count, began = max(2, trips), time.perf_counter()
    for _ in range(count):
        end.send(message)
    end.send(END)
    end.receive()
    return found | {"one_way_per_s": count / (time.perf_counter() - began)}


def run(side: str, seconds: float) -> dict[str, dict[str, float]]:
    ours, theirs = multiprocessing.Pipe()
    key = KEYS.get(side)
    target, told = (echo_sealed, (theirs, key)) if key else (echo_pickles, (theirs,))
    process = multiprocessing.get_context("spawn").Process(target=target, args=told)
    process.start()
    address = ours.recv()
    end: Any = None
    if key is None:
        secret = KEYS["sealed"].secret
        end = Pickles(multiprocessing.connection.Client(address, authkey=secret))
    else:
        end = wire.dial(address, key, ALL)
    cases = {
        "StepApplied": APPLIED,
        "StepHeld": HELD,
        "Heartbeat": BEAT,
        "read of 64 MiB": Content(bytes(64 << 20)),
    }
    found = {name: measure(end, message, seconds) for name, message in cases.items()}
    if key is not None:
        found["connection"] = {"per_s": connections_per_s(address, key, seconds)}
    process.kill()
    process.join()
    return found


def connections_per_s(address: wire.Address, key: JobKey, seconds: float) -> float:
    """Made and admitted, one after the other."""
    count, began = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - began) < seconds:
        channel = wire.dial(address, key, ALL)
        channel.send(BEAT)
        channel.receive()
        channel.close()
        count += 1
    return count / passed_s


def assignment(count: int) -> Assignment:
    members = tuple(Member(f"w{i}", f"n{i // 8}", f"host{i // 8}", i, i // 8) for i in range(count))
    buddies = tuple((((i + 8) % count),) for i in range(count))
    source = Source(100, Tier.HOST, "pp1.s1.tp1")
    return Assignment(2, members, (), Layout(dp_replicate=count), source, buddies, "a loss")


def form(count: int) -> dict[str, dict[str, float]]:
    """Of an assignment to ``count`` workers: all of it pickled, or the share of each of them."""
    made = assignment(count)

    def old() -> tuple[bytes, Callable[[], Any]]:
        data = zlib.compress(pickle.dumps(made), level=1)
        return data * count, lambda: pickle.loads(zlib.decompress(data))

    def new() -> tuple[bytes, Callable[[], Any]]:
        bodies = [encode(form) for _, form in forms(made, {})]
        return b"".join(bodies), lambda: TO_WORKER.decode(bodies[0])

    found = {}
    for name, make in (("pickle", old), ("sealed", new)):
        began = time.process_time()
        data, read = make()
        made_s, began = time.process_time() - began, time.process_time()
        read()
        found[name] = {
            "bytes": len(data),
            "made_ms": made_s * 1e3,
            "read_ms": (time.process_time() - began) * 1e3,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()
    if arguments.tls:
        KEYS["tls"] = new_key(tls=True)
    best: dict[str, dict[str, dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for side in ("pickle", *KEYS):
            for name, rates in run(side, arguments.seconds).items():
                known = best.setdefault(name, {}).setdefault(side, {})
                for what, rate in rates.items():
                    known[what] = max(rate, known.get(what, 0.0))
    TO_CONTROLLER.decode(encode(APPLIED))
    best[f"form of {arguments.members:,} members"] = form(arguments.members)
    for name, sides in best.items():
        for side, numbers in sides.items():
            shown = ", ".join(f"{what} {number:,.1f}" for what, number in numbers.items())
            print(f"{name:28} {side:8} {shown}")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
