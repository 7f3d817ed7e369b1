"""Step 0 of a model that begins with the weights of a folder, as a generation forms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from elastic_ft.config import Job
from elastic_ft.core.deadlines import READS_PER_FORMING
from elastic_ft.engines.initial_weights import load
from elastic_ft.engines.pretrained import check_same, known_config
from elastic_ft.errors import ModelError, StateUnreadable, StorageError
from elastic_ft.groups.groups import Groups
from elastic_ft.state.checkpoint_source import reading_checkpoint
from elastic_ft.state.tensors import LocalState
from elastic_ft.storage.cancellable import CancellableStore
from elastic_ft.storage.safetensors import folder_of, root_and_file

log = logging.getLogger(__name__)


def read_weights(
    job: Job,
    digest: str | None,
    groups: Groups,
    factory: Callable[[], nn.Module],
    parts: Iterable[LocalState],
) -> None:
    """Fills the ``model.*`` tensors of each of ``parts`` from the folder of ``model.weights``.

    ``digest``: that folder's; None: it was never looked at, and is the user's to say. Raises
    StateUnreadable of the generation's source while the store is away, or is of other weights than
    the digest's; GroupBroken; without a digest ModelError, StorageError.
    """
    with torch.device("meta"):
        model = factory()
    root, file = root_and_file(str(job.model.weights))
    holder, silent_s = groups.assignment.source.url, job.elastic.form_timeout_s / READS_PER_FORMING
    store, remarks = CancellableStore(root, silent_s, groups.received), ()
    with reading_checkpoint(groups, store, holder):
        try:
            folder = folder_of(store, file)
            if digest is not None:  # each time, by each rank: it may be replaced in between
                check_same(folder, known_config(folder), digest)
            for state in parts:
                _, remarks = load(folder, model, state)
        except (ModelError, StorageError) as error:
            if digest is None:
                raise
            raise StateUnreadable(str(error), holder) from error
    for remark in remarks if groups.rank == 0 else ():
        log.warning(remark)
