"""Preflight of the run folder and of the checkpoints: can be written, are this job's, fit it."""

from __future__ import annotations

import os
import posixpath
import tempfile
from pathlib import Path

from elastic_ft.config import Job
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.terms import Terms, changes, refusal, terms_of_manifest
from elastic_ft.errors import (
    CheckpointMismatch,
    ConfigError,
    StateDamaged,
    StorageError,
    StoreFailed,
    UsageError,
)
from elastic_ft.storage.mounts import can_hang
from elastic_ft.storage.store import Store, check_access

CHECK_DEADLINE_S = 20.0  # of one look into a store
FOLDERS_OF_A_RUN = ("owners", "segments")
FOLDERS_OF_CHECKPOINTS = ("owners", "data", "manifests", "emergency")

TensorTable = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def check_writable(key: str, url: str) -> tuple[str, ...]:
    """Returns warnings. Raises StorageError. Leaves nothing behind, not even a folder."""
    from elastic_ft.storage.backends import backend_of
    from elastic_ft.storage.local_files import Local

    where = url if "://" in url else str(Path(url).absolute())
    if where.encode(errors="replace").decode() != where:  # it goes into messages and JSON
        shown = where.encode(errors="backslashreplace").decode()
        raise StorageError(f"{key}: {shown}: expected a path in UTF-8 (is the locale's another?)")
    try:
        backend, _ = backend_of(url)
        if isinstance(backend, Local):
            _check_folder(url)
            return ()
        return check_access(url)
    except StorageError as error:
        raise StorageError(f"{key}: {error}") from None


def _check_folder(url: str) -> None:
    """Writes a file where the folder is, or would be made. (Root may write where modes forbid.)"""
    folder = Path(url.removeprefix("file://")).absolute()
    found = next(path for path in (folder, *folder.parents) if path.exists())
    if not found.is_dir():
        raise StorageError(f"{folder}: {found} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=found):
            pass
        if found != folder:  # some filesystems take files and no folders
            Path(tempfile.mkdtemp(prefix=".probe-", dir=found)).rmdir()
    except OSError as error:
        raise StorageError(f"{folder}: cannot write in {found}: {error.strerror}") from None


def check_apart(out: str, url: str) -> None:
    """Raises ConfigError where run folder and checkpoints would take each other's files for theirs:
    both have ``owners``, and marks of who ended and was rescued."""
    from elastic_ft.storage.store import open_store

    folder, checkpoints = (_plain(open_store(where).url) for where in (out, url))
    for key, where, other, taken in (
        ("checkpoint.url", checkpoints, folder, ("", *FOLDERS_OF_A_RUN)),
        ("run folder (--out)", folder, checkpoints, FOLDERS_OF_CHECKPOINTS),
    ):
        for name in taken:
            place = posixpath.join(other, name).rstrip("/")
            if where == place or (name and where.startswith(f"{place}/")):
                whose = "the run folder's" if key == "checkpoint.url" else "checkpoint.url's"
                raise ConfigError(
                    f"{key}: {where} is {whose}{f' {name}/' if name else ''}: each needs a place "
                    "of its own, as checkpoints/ in the run folder is"
                )


def _plain(url: str) -> str:
    """One of the ways to write it."""
    scheme, mark, path = url.rpartition("://")
    if mark or can_hang(Path(path)):  # links there are not followed: that may take for ever
        return f"{scheme}{mark}{posixpath.normpath(path)}"
    return os.path.realpath(path)


def check_owner(job: Job, out: str, url: str) -> None:
    """Raises UsageError where the run folder or the checkpoints are another job's."""
    from elastic_ft.storage import owners
    from elastic_ft.storage.store import open_store

    for key, where in (("run folder (--out)", out), ("checkpoint.url", url)):
        try:
            owners.check_job(open_store(where, deadline_s=CHECK_DEADLINE_S), job.name)
        except UsageError as error:
            raise ConfigError(f"{key}: {error}") from None
        except StoreFailed as error:
            raise StorageError(f"{key}: {error}") from None


def check_checkpoint(url: str, expected: TensorTable, terms: Terms, steps: int) -> None:
    """Compares the newest checkpoint with the model, with the ``terms`` of going on from it, and
    with the run's last step. Raises CheckpointMismatch, ConfigError, StorageError."""
    from elastic_ft.observe.outcome import check_resume_point
    from elastic_ft.storage import checkpoints, owners
    from elastic_ft.storage.store import open_store

    store = open_store(url, deadline_s=CHECK_DEADLINE_S)
    try:
        for newest in owners.counting(store, checkpoints.committed(store))[:1]:
            _check_newest(store, newest, expected, terms)
            check_resume_point(steps, newest.step, newest.url)
    except StoreFailed as error:
        raise StorageError(f"checkpoint.url: {error}") from None


def _check_newest(store: Store, ref: CheckpointRef, expected: TensorTable, terms: Terms) -> None:
    """A damaged manifest is not refused: the job falls back to an older one, and says so (I5)."""
    from elastic_ft.storage import checkpoints

    try:
        manifest = checkpoints.load_manifest(store, ref)
    except StateDamaged:
        return
    found = {
        name: (spec.dtype, tuple(spec.shape))
        for name, spec in manifest.tensors.items()
        if name.startswith("model.")
    }
    if found != expected:
        from elastic_ft.worker.restore import mismatch_message  # imports torch

        raise CheckpointMismatch(f"checkpoint.url: {mismatch_message(ref.url, found, expected)}")
    if other := changes(terms_of_manifest(manifest.extra), terms):
        raise ConfigError(refusal(other, manifest.step, ref.url))
