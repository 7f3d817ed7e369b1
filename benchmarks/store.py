"""Checkpoint shards to and from a real S3 server, against a bare obstore client on the same bytes.

    python benchmarks/store.py --mib 512 --rounds 5

Each round runs the two in turn on the same SeaweedFS server: ``bare`` puts 64 MiB objects from a
memoryview, four at a time, and gets them back; ``shards`` is ``write_shards`` (packing, digests)
and ``Reader.read`` into the caller's buffers (digests verified). The figure is the ratio of the
two in a round; its median and min-max over the rounds are printed, with the host memory that each
took beside the state. Raw numbers go to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import psutil
from obstore.store import S3Store

from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.storage.shards import OBJECT_BYTES, THREADS, Reader, Want, write_shards
from elastic_ft.storage.store import Store, open_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chaos.s3_server import S3Server, s3_server

TENSORS = 10  # the state's; not of equal sizes
SAMPLE_S = 0.005


State = dict[str, np.ndarray[Any, Any]]


def make_state(nbytes: int) -> tuple[np.ndarray[Any, Any], State]:
    """One buffer, and tensors of unequal sizes in it."""
    flat = np.random.default_rng(0).integers(0, 2**32, nbytes // 4, np.uint32)
    ends = np.cumsum(np.arange(1, TENSORS + 1)) * flat.size // sum(range(TENSORS + 1))
    return flat, {f"t{n}": part for n, part in enumerate(np.split(flat, ends[:-1]))}


def measured(work: Callable[[], object], nbytes: int) -> dict[str, float]:
    """MB/s, CPU seconds of this process, and the peak of its memory above what it had, in MB."""
    process, ended = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def sample() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_S):
            peak = max(peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    began_s, cpu_s = time.monotonic(), time.process_time()
    work()
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    ended.set()
    sampler.join()
    rate = nbytes / took_s / 1e6
    return {"mb_per_s": rate, "cpu_s": cpu_s, "extra_mb": (peak - before) / 1e6}


# ---------------------------------------------------------------------------- the two


def bare(s3: S3Server, flat: np.ndarray[Any, Any], name: str) -> dict[str, Any]:
    client = S3Store(s3.bucket, prefix=name, client_options={"allow_http": True})
    view = memoryview(flat).cast("B")
    parts = [view[at : at + OBJECT_BYTES] for at in range(0, view.nbytes, OBJECT_BYTES)]

    def each(work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for future in [pool.submit(work, n) for n in range(len(parts))]:
                future.result()

    def put(n: int) -> None:
        obstore.put(client, str(n), parts[n], use_multipart=False)

    def get(n: int) -> None:
        found = obstore.get(client, str(n)).bytes()
        assert len(found) == parts[n].nbytes

    result = {
        "write": measured(lambda: each(put), view.nbytes),
        "read": measured(lambda: each(get), view.nbytes),
    }
    obstore.delete(client, [str(n) for n in range(len(parts))])
    return result


def shards(store: Store, state: State, name: str) -> dict[str, Any]:
    nbytes = sum(array.nbytes for array in state.values())
    entries: list[dict[str, Any]] = []

    def write() -> None:
        pieces = (
            (name, Box.whole(array.shape), "uint32", memoryview(array).cast("B"))
            for name, array in state.items()
        )
        entries.extend(write_shards(store, f"data/{name}/g1-s1", 0, pieces))

    result = {"write": measured(write, nbytes)}
    tensors = {key: TensorSpec("uint32", array.shape) for key, array in state.items()}
    manifest = Manifest(
        job="bench",
        run=name,
        step=1,
        generation=1,
        nonce="",
        layout="",
        created_at_s=0.0,
        tensors=tensors,
        entries=tuple(map(ShardEntry.from_dict, entries)),
    )
    found = {key: np.ones_like(array) for key, array in state.items()}
    wants = [
        Want(key, Box.whole(array.shape), memoryview(array).cast("B"))
        for key, array in found.items()
    ]
    reader = Reader(store, manifest, "bench")
    result["read"] = measured(lambda: reader.read(wants), nbytes)
    assert all((found[key] == array).all() for key, array in state.items())
    store.delete(f"data/{name}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/store.json"))
    arguments = parser.parse_args()
    flat, state = make_state(arguments.mib * 2**20)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as s3:
        os.environ.update(s3.env)
        store = open_store(s3.url("bench"))
        both = [
            ("bare", lambda number: bare(s3, flat, f"bare{number}")),
            ("shards", lambda number: shards(store, state, f"shards{number}")),
        ]
        for number in range(arguments.rounds + 1):  # the first warms up both
            rounds.append({name: run(number) for name, run in (both if number % 2 else both[::-1])})
    for way in ("write", "read"):
        ratios = [r["shards"][way]["mb_per_s"] / r["bare"][way]["mb_per_s"] for r in rounds[1:]]
        rates = [r["shards"][way]["mb_per_s"] for r in rounds[1:]]
        extra = [r["shards"][way]["extra_mb"] for r in rounds[1:]]
        print(
            f"{way}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of a "
            f"bare client, {statistics.median(rates):.0f} MB/s, "
            f"{statistics.median(extra):.0f} MB of memory beside the state"
        )
    arguments.out.write_text(json.dumps({"mib": arguments.mib, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
