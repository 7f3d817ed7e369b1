"""Checkpoints over a store that fails in every way its proxy knows (I5).

Each mix of faults is drawn from its seed and runs against a real S3 server. Whatever happens, a
reader gets exactly the bytes of a committed state or a named error; once the faults stop, the
newest acknowledged checkpoint is there and the next one can be written.
"""

from __future__ import annotations

import queue
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np
import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import S3Server
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateDamaged, StoreFailed
from elastic_ft.storage import store as store_module
from elastic_ft.storage.checkpoints import committed, delete_attempt, load_manifest, sweep_abandoned
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.objects import Objects
from elastic_ft.storage.shards import Reader, Want, attempt_prefix, write_shards
from elastic_ft.storage.store import Store, StoreError
from tests.storage.published import commit

MIXES, MORE = 50, 400  # in CI, and in the soak
AT_ONCE = 8
SAVES = 3  # with faults; one more after them
WORLD = 2
ROWS = 300
HEALED_DEADLINE_S = 60.0  # once nothing is wrong any more: a slow machine is no fault
DEADLINE_S = 0.5
KINDS = ("busy", "revoked", "no_bucket", "slow", "reset", "truncate", "corrupt_up", "corrupt_down")
KINDS += ("lost_ack", "stall")
# A listing has no digest: a bit flipped in it is the transport's to find (TLS does).
NO_LISTING = r"^(?!.*list-type)"


def faults_of(rng: random.Random) -> list[StoreFault]:
    """One to three kinds, each hitting some of the requests."""
    chosen = rng.sample(KINDS, rng.randint(1, 3))
    return [
        StoreFault(
            kind,  # type: ignore[arg-type]
            probability=rng.choice((0.1, 0.3, 0.7)),
            count=1 if kind == "stall" else rng.choice((1, 5, None)),
            methods=rng.choice(((), ("PUT",), ("GET",))) if kind in KINDS[:5] else (),
            path=NO_LISTING if kind.startswith("corrupt") else "",
            seed=rng.randrange(2**32),
        )
        for kind in chosen
    ]


def state_of(seed: int, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.random.default_rng((seed, step)).integers(0, 2**32, (ROWS, 5), np.uint32)


@dataclass
class Mix:
    """One seed's story. ``faulty`` goes through the proxy, ``direct`` does not."""

    seed: int
    faulty: Store
    direct: Store
    proxy: ObjectStoreProxy
    told: list[str] = field(default_factory=list)
    acknowledged: int = 0  # the newest step whose commit returned
    attempts: int = 0

    def run(self) -> None:
        rng = random.Random(self.seed)
        for step in range(1, SAVES + 1):
            faults = faults_of(rng)
            self.told.append(f"step {step}: {faults}")
            self.proxy.set(*faults)
            self.save(step)
            self.read_newest(self.faulty)
            self.everything_visible_is_whole()
        self.proxy.set()
        self.faulty = Store(self.faulty.url, self.faulty.backend, HEALED_DEADLINE_S)
        newest = self.read_newest(self.faulty)
        assert newest is not None or not self.acknowledged
        assert (newest or 0) >= self.acknowledged
        assert self.save(SAVES + 1), "nothing is wrong any more"
        assert self.read_newest(self.faulty) == SAVES + 1
        self.everything_visible_is_whole()
        assert sweep_abandoned(self.faulty) == ()
        self.everything_visible_is_whole()

    def save(self, step: int) -> bool:
        """As a controller does: what failed before the commit is deleted, if that can be done."""
        self.attempts += 1
        prefix = attempt_prefix("run", self.attempts, step)
        state = state_of(self.seed, step)
        entries = []
        try:
            for rank in range(WORLD):
                rows = state[rank * ROWS // WORLD : (rank + 1) * ROWS // WORLD]
                box = Box((rank * ROWS // WORLD, 0), rows.shape)
                piece = ("w", box, "uint32", memoryview(rows).cast("B"))
                entries += write_shards(self.faulty, prefix, rank, [piece])
        except StoreFailed as error:
            self.told.append(f"not written: {error}")
            try:
                delete_attempt(self.faulty, prefix)
            except StoreFailed as also:
                self.told.append(f"not abandoned: {also}")
            return False
        manifest = Manifest(
            job="job",
            run="run",
            step=step,
            generation=self.attempts,
            nonce=uuid4().hex,
            layout="",
            created_at_s=0.0,
            tensors={"w": TensorSpec("uint32", state.shape)},
            entries=tuple(map(ShardEntry.from_dict, entries)),
        )
        try:
            done = commit(self.faulty, manifest, keep_last=2)
        except StoreFailed as error:
            self.told.append(f"not committed: {error}")
            return False
        self.told.append(f"committed {done}")
        self.acknowledged = step
        return True

    def read_newest(self, store: Store) -> int | None:
        """As a restart does: the newest that is good. Returns its step."""
        try:
            refs = committed(store)
        except StoreFailed as error:
            self.told.append(f"not listed: {error}")
            return None
        for ref in refs:
            found = np.zeros((ROWS, 5), np.uint32)
            try:
                reader = Reader(store, load_manifest(store, ref), ref.url)
                reader.read([Want("w", Box.whole(found.shape), memoryview(found).cast("B"))])
            except (StateDamaged, StoreFailed) as error:
                self.told.append(f"not read: {error}")
                continue
            assert (found == state_of(self.seed, ref.step)).all(), f"damaged state, step {ref.step}"
            return ref.step
        return None

    def everything_visible_is_whole(self) -> None:
        """Read without the proxy: every manifest that there is has all its bytes."""
        for ref in committed(self.direct):
            found = np.zeros((ROWS, 5), np.uint32)
            reader = Reader(self.direct, load_manifest(self.direct, ref), ref.url)
            reader.read([Want("w", Box.whole(found.shape), memoryview(found).cast("B"))])
            assert (found == state_of(self.seed, ref.step)).all(), f"damaged state, step {ref.step}"


@pytest.fixture
def proxies(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ObjectStoreProxy]]:
    monkeypatch.setattr(store_module, "PAUSES_S", (0.005, 0.01, 0.02))
    with ExitStack() as stack:
        yield [stack.enter_context(ObjectStoreProxy(s3.endpoint)) for _ in range(AT_ONCE)]


def through(proxy: ObjectStoreProxy, s3: S3Server, prefix: str, deadline_s: float) -> Store:
    path = f"{s3.bucket}/{prefix}"
    backend = Objects("s3", path, endpoint=proxy.endpoint)
    return Store(f"s3://{path}", backend, deadline_s)


@pytest.mark.parametrize("mixes", [MIXES, pytest.param(MORE, marks=pytest.mark.soak)])
def test_no_mix_of_faults_shows_half_a_checkpoint(
    s3: S3Server, proxies: list[ObjectStoreProxy], mixes: int
) -> None:
    free: queue.SimpleQueue[ObjectStoreProxy] = queue.SimpleQueue()
    for proxy in proxies:
        free.put(proxy)

    def run(seed: int) -> str:
        proxy = free.get()
        prefix = f"mix/{uuid4().hex}"
        direct = Store(s3.url(prefix), Objects("s3", f"{s3.bucket}/{prefix}"))
        mix = Mix(seed, through(proxy, s3, prefix, DEADLINE_S), direct, proxy)
        try:
            mix.run()
        except Exception as error:
            return "\n".join([f"seed {seed}: {type(error).__name__}: {error}", *mix.told])
        finally:
            proxy.set()
            free.put(proxy)
        return ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = [story for story in pool.map(run, range(mixes)) if story]
    assert not failed, f"{len(failed)} of {mixes} mixes\n\n" + "\n\n".join(failed[:3])
    fired = sum((proxy.fired for proxy in proxies), Counter())
    assert set(fired) == set(KINDS), fired


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("busy", FailureKind.BUSY),
        ("revoked", FailureKind.FORBIDDEN),
        ("no_bucket", FailureKind.NO_BUCKET),
        ("stall", FailureKind.UNREACHABLE),
        ("reset", FailureKind.UNREACHABLE),
        ("truncate", FailureKind.UNREACHABLE),
        ("lost_ack", FailureKind.UNREACHABLE),
        ("corrupt_up", FailureKind.UNREACHABLE),
    ],
)
def test_each_fault_has_its_name_and_ends(
    s3: S3Server, proxies: list[ObjectStoreProxy], kind: str, expected: FailureKind
) -> None:
    proxy = proxies[0]
    deadline_s = DEADLINE_S if kind == "stall" else HEALED_DEADLINE_S  # the others are answered
    patient = through(proxy, s3, uuid4().hex, HEALED_DEADLINE_S)
    store = Store(patient.url, patient.backend, deadline_s)
    patient.put("k", bytes(1000))
    proxy.set(StoreFault(kind))  # type: ignore[arg-type]
    with pytest.raises(StoreError) as caught:
        store.put("k", bytes(1000)) if kind == "corrupt_up" else store.get("k")
    assert caught.value.kind is expected, caught.value
    assert "\n" not in str(caught.value)
    proxy.set()
    assert patient.get("k") == bytes(1000)
