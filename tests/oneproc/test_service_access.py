"""Who may what of a service: tokens, pages of other sites, certificates, its config."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.service.access import Rights, check_host, new_token, read_token
from elastic_ft.service.served_at import HowToServe
from elastic_ft.service.service_client import Client, ServiceAway
from elastic_ft.service.service_config import load_config
from tests.oneproc.served import JOB, WAIT_S, Served, post


def test_who_may_what(serve: Callable[..., Served], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("ann", "bob", "eve")}
    digests = {name: new_token(path) for name, path in files.items()}
    users = {
        "ann": Rights(digests["ann"], read=("*",), write=("*",)),
        "bob": Rights(digests["bob"], read=("research",), write=("research",)),
    }
    served = serve(users)
    ann, bob = (served.client(files[name]) for name in ("ann", "bob"))
    mine, hers = bob.submit(JOB, queue="research")["id"], ann.submit(JOB)["id"]
    assert [job["id"] for job in ann.jobs()] == [mine, hers]
    assert [(job["id"], job["by"]) for job in bob.jobs()] == [(mine, "bob")]
    for foreign in (hers, "nosuch-1"):  # he can't tell one from the other
        for ask in (bob.status, bob.stop):
            with pytest.raises(ConfigError, match=f"^there is no job {foreign}$"):
                ask(foreign)
    assert [queue["queue"] for queue in bob.service()["queues"]] == ["research"]
    assert [queue["queue"] for queue in ann.service()["queues"]] == ["default", "research"]
    bearer = {"Authorization": f"Bearer {read_token(files['bob'])}"}
    asked_by_bob = urllib.request.Request(f"{served.url}/metrics", headers=bearer)
    with urllib.request.urlopen(asked_by_bob, timeout=WAIT_S) as answer:
        counted = answer.read().decode()
    assert 'queue="research"' in counted and 'queue="default"' not in counted
    with pytest.raises(ConfigError, match="bob may not change jobs of queue default"):
        bob.submit(JOB)
    with pytest.raises(ConfigError, match="bob may not stop the service"):
        bob.stop_service()
    for stranger in (served.client(), served.client(files["eve"])):
        with pytest.raises(ConfigError, match=r"no token|a token that the service knows"):
            stranger.jobs()
    ann.stop(mine)
    journal = sorted((tmp_path / "F/journal").glob("*.jsonl"))
    lines = [json.loads(text) for path in journal for text in path.read_text().splitlines()]
    asked = [(line["event"], line["by"]) for line in lines if "by" in line]
    assert asked == [("JobSubmitted", "bob"), ("JobSubmitted", "ann"), ("StopAsked", "ann")]
    assert not any(
        read_token(path) in text.read_text() for path in files.values() for text in journal
    )


@pytest.mark.parametrize(
    ("headers", "status", "line"),
    [
        ({"Origin": "http://evil.example"}, 403, "Origin: expected 127.0.0.1:"),
        ({"Origin": "null"}, 403, "Origin: expected 127.0.0.1:"),
        ({"Content_Type": "text/plain"}, 415, "Content-Type: expected application/json"),
        ({"Host": "rebound.example:8266"}, 403, "Host: expected this machine's loopback"),
    ],
)
def test_a_page_of_another_site_commands_nothing(
    serve: Callable[..., Served], headers: dict[str, str], status: int, line: str
) -> None:
    """What the browser of somebody at this machine sends in another page's name."""
    served = serve()
    asked = json.dumps({"job": JOB}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, asked, **headers)
    assert refused.value.code == status
    assert json.loads(refused.value.read())["error"].startswith(line)
    assert served.client().jobs(all=True) == []
    assert post(served, asked, Origin=served.url).status == 201  # its own page


def test_a_token_of_strange_bytes_is_no_token(serve: Callable[..., Served]) -> None:
    served = serve({"ann": Rights("0" * 64)})
    request = urllib.request.Request(f"{served.url}/api/v1/jobs")
    request.add_header("Authorization", "Bearer \xff\xfe")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_S)
    assert refused.value.code == 401


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_by_certificate_files(serve: Callable[..., Served], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=s"
    )
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    served = serve(tls=HowToServe("F", tls_cert=str(cert), tls_key=str(key)).tls())
    client = Client(served.url, ca_file=cert, away_s=0.0)
    assert client.submit(JOB)["page"].startswith("https://127.0.0.1")
    with pytest.raises(ServiceAway, match="certificate verify failed"):
        Client(served.url, away_s=0.0).jobs()
    with pytest.raises(UsageError, match="--tls-cert, --tls-key"):
        HowToServe("F", tls_cert=str(key), tls_key=str(key)).tls()  # a key is no certificate


def test_a_token_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "token"
    new_token(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read this token"):
        Client(token_file=path)
    with pytest.raises(ConfigError, match="expected users in --config"):
        check_host("0.0.0.0", {})


def test_a_config_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("queues: {a: {quota: 4, weigth: 2}}\n")
    with pytest.raises(ConfigError, match=r"queues\.a\.weigth"):
        load_config(path)
