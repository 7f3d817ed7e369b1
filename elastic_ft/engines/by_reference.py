"""Frozen weights of a job's model, by reference: what they are is in a folder of safetensors.

They are laid out with the rest, and are no state: in no snapshot and no checkpoint. Who has laid
the model out anew is given its rows by peers that have them, and reads from the folder just what
none has (``worker.frozen_weights``). That it is the same folder is said by its digest, which is
among the run's terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from elastic_ft.engines.initial_weights import Matched, fill, match
from elastic_ft.engines.pretrained import KEY, check_same, known_config
from elastic_ft.errors import BaseAway, ModelError, StorageError, StoreFailed
from elastic_ft.groups.groups import Groups
from elastic_ft.state.tensors import LocalState
from elastic_ft.storage.safetensors import SafetensorsFolder, Stored, folder_of, root_and_file
from elastic_ft.storage.store import Store, open_store

InFolder = tuple[Mapping[str, Stored], Matched]  # where which tensor lies


class Reference:
    """Attributes:
    url: of the folder, or of its one file's.
    digest: what it is known by.
    names: of the weights, in the model.
    targets: what is laid out, and not yet filled.
    in_place: all that is laid out is filled.
    held: what is there from a generation before: ``shard`` of what was cut as ``space`` says.
    """

    def __init__(self, url: str, model: nn.Module) -> None:
        """``model``: the whole one, on meta will do."""
        (self.url, self._file), self.digest = root_and_file(url), ""
        self.names = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
        self.targets: LocalState = {}
        self.held: LocalState = {}
        self.space, self.shard, self.in_place = "", "", False
        self._model = model

    def open(self) -> None:
        """Before the first generation: whether the folder has them. Raises ModelError, BaseAway."""
        try:
            self._match(open_store(self.url))
        except StoreFailed as error:
            raise BaseAway(f"{KEY}: {error}") from None
        except StorageError as error:
            raise ModelError(f"{KEY}: {error}") from None

    def _match(self, store: Store) -> InFolder:
        folder = folder_of(store, self._file)
        specs = {name: stored.spec for name, stored in folder.tensors.items()}
        return folder.tensors, match(self._model, specs, folder.url, KEY, frozen_only=True)

    def find(self, store: Store) -> InFolder:
        """What is in ``store``, which is at ``url``: looked at anew each time, as somebody may have
        replaced it. Raises StoreFailed, StorageError, ModelError."""
        found = self._match(store)
        folder = SafetensorsFolder(store, found[0])
        check_same(folder, known_config(folder), self.digest)
        return found

    def read(self, store: Store, found: InFolder, parts: LocalState) -> int:
        """Fills ``parts``. Returns bytes read. Raises StoreFailed."""
        with torch.no_grad():
            return fill(SafetensorsFolder(store, found[0]), found[1], parts)

    # ------------------------------------------------------------- as the engine is laid out

    def laid_out(self, parts: LocalState, in_place: bool) -> None:
        """``parts``: of this rank, those that it holds or still to be filled."""
        self.in_place = in_place
        if not in_place:
            self.targets = parts

    def filled(self) -> None:
        """All targets are. What was held is not needed any more."""
        self.targets, self.held, self.in_place = {}, {}, True

    def left(self, parts: Callable[[], LocalState], groups: Groups | None) -> None:
        """A generation ends. What it has filled stays valid; else what was held before is."""
        if self.in_place and groups is not None and groups.rank is not None:
            layout = groups.assignment.layout
            self.held, self.space = parts(), layout.shard_space
            self.shard = layout.shard_of(groups.rank)
        self.targets, self.in_place = {}, False

    def leave_device(self) -> None:
        """What is held is in host memory then: on the device both cuts may be too much."""
        self.held = {name: replace(t, local=t.local.cpu()) for name, t in self.held.items()}
