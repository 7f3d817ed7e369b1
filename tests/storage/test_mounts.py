"""What can hang is known without a look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.observe.lines import local_path
from elastic_ft.storage import mounts
from tests.hanging import needs_root, silent

TABLE = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
server:/home /mnt/a\\040b nfs rw 0 0
/dev/sdb /home/disk xfs rw 0 0
//server/share /mnt/cifs cifs rw 0 0
remote: /mnt/drive fuse.rclone rw 0 0
/dev/sdc /mnt/usb fuseblk rw 0 0
overlay /mnt/layers fuse.fuse-overlayfs rw 0 0
systemd-1 /mnt/auto autofs rw 0 0
server:/old /mnt/over nfs rw 0 0
/dev/sdd /mnt/over ext4 rw 0 0
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mounts"
    path.write_text(TABLE)
    monkeypatch.setattr(mounts, "MOUNTS", path)
    return path


@pytest.mark.parametrize(
    ("path", "hangs"),
    [
        ("/", False),
        ("/var/runs", False),
        ("/home/me/runs", True),
        ("/homes", False),
        ("/home/disk/runs", True),  # the way there is through /home
        ("/mnt/a b/runs", True),
        ("/mnt/cifs", True),
        ("/mnt/drive/x", True),
        ("/mnt/usb/x", False),
        ("/mnt/layers/x", False),
        ("/mnt/auto/x", True),
        ("/mnt/over/x", False),
        ("/var/../home/x", True),
    ],
)
def test_each_mount_on_the_way_counts(table: Path, path: str, hangs: bool) -> None:
    assert mounts.can_hang(Path(path)) == hangs
    assert (local_path(path) is None) == hangs
    assert (local_path(f"file://{path}") is None) == hangs


def test_a_root_from_a_server_is_the_machines_own_disk(table: Path) -> None:
    """Python is there, too: with it every folder would be mirrored, and nothing gained."""
    table.write_text(TABLE + "server:/root / nfs rw 0 0\n")
    assert not mounts.can_hang(Path("/var/runs"))
    assert mounts.can_hang(Path("/home/me"))


def test_links_on_the_way_are_followed(table: Path, tmp_path: Path) -> None:
    for name, target in (("far", "/home/me"), ("near", "folder"), ("up", "../../../home/me")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "round").symlink_to("round")
    table.write_text(f"{TABLE}server:/x {tmp_path}/folder/below nfs rw 0 0\n")
    found = {
        name: mounts.can_hang(tmp_path / name)
        for name in ("far/runs", "near/runs", "near/below/runs", "round/runs")
    }
    expected = {"far/runs": True, "near/runs": False, "near/below/runs": True, "round/runs": False}
    assert found == expected


def test_what_the_user_names_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path(str(tmp_path / "runs")) == tmp_path / "runs"
    monkeypatch.setenv(mounts.NAMED, f"/elsewhere:{tmp_path}/runs/")
    assert local_path(str(tmp_path / "runs" / "a")) is None
    assert local_path(str(tmp_path / "other")) == tmp_path / "other"


@needs_root
@pytest.mark.timeout(60)
def test_nothing_is_asked_of_one_that_hangs(tmp_path: Path) -> None:
    """A look at it, or at what a link there leads to, would not come back."""
    with silent(tmp_path) as point:
        (tmp_path / "link").symlink_to(point / "runs")
        assert mounts.can_hang(point / "runs" / "a")
        assert mounts.can_hang(tmp_path / "link" / "a")
        assert not mounts.can_hang(tmp_path / "runs")
