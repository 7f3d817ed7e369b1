"""What is broken around a run, and that it is whole again afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fault_kinds import Network
from chaos.network import Bridge, iptables, network_lacks, rules_of, run, sweep
from chaos.scenario import Scenario
from chaos.surroundings import ENDPOINT, surroundings
from elastic_ft.errors import ConfigError
from elastic_ft.transport.control import TO_CONTROLLER, Heartbeat
from elastic_ft.transport.reception import Reception
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import CutOff, dial


def scenario(**fault: object) -> Scenario:
    return Scenario.model_validate({"faults": [{"at_step": 1, "lasts_s": 1, **fault}]})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_takes_nothing_until_it_heals(small_disk: Path) -> None:
    (small_disk / "before").write_text("kept")
    with surroundings(scenario(fill="run_folder"), str(small_disk), "unused") as around:
        heal = around.fill()
        with pytest.raises(OSError) as full, (small_disk / "more").open("ab", buffering=0) as file:
            file.write(b"x" * 5000)
            file.write(b"x" * 5000)
        assert full.value.errno == errno.ENOSPC
        heal()
        (small_disk / "more").write_bytes(b"x" * 5000)
    assert (small_disk / "before").read_text() == "kept"


def test_a_large_disk_is_never_filled(tmp_path: Path) -> None:
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    if size <= 1 << 30:
        pytest.skip("this machine's own disk is a small one")
    faults = scenario(fill="checkpoints")
    with (
        pytest.raises(ConfigError, match="fills none larger"),
        surroundings(faults, "unused", str(tmp_path)),
    ):
        pass


def test_store_faults_need_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    with (
        pytest.raises(ConfigError, match="faults of the store need"),
        surroundings(scenario(store="busy"), "unused", "/tmp/checkpoints"),
    ):
        pass


def test_the_store_is_reached_through_the_proxy_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    with surroundings(scenario(store="busy"), "unused", "s3://bucket/run") as around:
        assert around.proxy is not None
        assert os.environ[ENDPOINT] == around.proxy.endpoint != "http://127.0.0.1:1"
    assert os.environ[ENDPOINT] == "http://127.0.0.1:1"


def test_each_direction_of_a_link_can_be_cut() -> None:
    if why := network_lacks():
        pytest.skip(why)
    bridge = Bridge()
    try:
        node = bridge.add()
        route = ("ip", "netns", "exec", node.name, "ip", "route", "get", bridge.address)
        assert "eth0" in run(*route)
        for way in ("in", "out", "both"):
            cut = Network(at_step=1, network="cut", of_rank=0, way=way, lasts_s=1)  # type: ignore[arg-type]
            for rule in rules_of(cut):
                iptables(node.name, "-A", rule)
            listed = run("ip", "netns", "exec", node.name, "iptables", "-S")
            assert listed.count("-j DROP") == len(rules_of(cut)) == (2 if way == "both" else 1)
            for rule in rules_of(cut):
                iptables(node.name, "-D", rule)
        assert "DROP" not in run("ip", "netns", "exec", node.name, "iptables", "-S")
    finally:
        bridge.close()
    assert node.name not in run("ip", "netns", "list")


def test_what_a_killed_process_left_is_swept() -> None:
    if why := network_lacks():
        pytest.skip(why)
    bridge = Bridge()
    node = bridge.add()
    node.starter.shutdown()
    sweep(os.getpid())
    assert node.name not in run("ip", "netns", "list")
    assert f"eft{os.getpid()}" not in run("ip", "link")


@pytest.mark.parametrize("way", ["in", "out"])
def test_who_is_cut_off_knows_it_in_time(way: str) -> None:
    """In either direction, from its own heartbeats: nobody else can tell it."""
    if why := network_lacks():
        pytest.skip(why)
    bridge = Bridge()
    over = threading.Event()
    try:
        node = bridge.add()
        key, ended = JobKey(b"k" * 32), threading.Event()
        reception = Reception(
            "there",
            bridge.address,
            key,
            TO_CONTROLLER,
            lambda channel: ended.wait(60),
        )
        reception.start()
        with contextlib.closing(reception):
            address = (bridge.address, reception.port)
            channel = node.starter.submit(dial, address, key, TO_CONTROLLER).result(10)
            channel.end_when_unheard(2.0)
            cut = Network(at_step=1, network="cut", of_rank=0, way=way, lasts_s=1)  # type: ignore[arg-type]
            iptables(node.name, "-A", rules_of(cut)[0])

            def beat() -> None:
                while not over.wait(0.25):
                    channel.send(Heartbeat("w0", 1, 1, 1, "still here"))

            heart = threading.Thread(target=beat, daemon=True)
            heart.start()
            with pytest.raises(CutOff):
                channel.receive(timeout_s=30)
            over.set()
            heart.join()
            ended.set()
            channel.close()
    finally:
        over.set()
        bridge.close()
