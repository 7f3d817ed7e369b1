"""Frozen weights of a job's model, by reference: what they are is in a folder of safetensors.

They are laid out with the rest, and are no state: in no snapshot, no checkpoint, no transfer. Who
has laid the model out anew reads its own rows of them from the folder, and needs no peer for it.
That it is the same folder is said by its digest, which is among the run's terms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from elastic_ft.engines.initial_weights import Matched, fill, match
from elastic_ft.engines.pretrained import KEY
from elastic_ft.errors import BaseAway, ModelError, StorageError, StoreFailed
from elastic_ft.state.tensors import LocalState
from elastic_ft.storage.safetensors import SafetensorsFolder, Stored, open_folder
from elastic_ft.storage.store import Store


class Reference:
    """Attributes:
    url: of the folder.
    names: of the weights, in the model.
    targets: what is laid out, and not yet read.
    """

    def __init__(self, url: str, model: nn.Module) -> None:
        """Reads headers. ``model``: the whole one, on meta will do. Raises ModelError."""
        try:
            folder = open_folder(url)
        except StoreFailed as error:
            raise BaseAway(f"{KEY}: {error}") from None
        except StorageError as error:
            raise ModelError(f"{KEY}: {error}") from None
        specs = {name: stored.spec for name, stored in folder.tensors.items()}
        self.url = folder.url
        self.names = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
        self.targets: LocalState = {}
        self._matched: Matched = match(model, specs, folder.url, KEY, frozen_only=True)
        self._tensors: Mapping[str, Stored] = folder.tensors

    def read(self, store: Store) -> int:
        """Fills the targets from ``store``, which is at ``url``. Returns bytes read.

        Raises StoreFailed; then they are still to be read.
        """
        with torch.no_grad():
            nbytes = fill(SafetensorsFolder(store, self._tensors), self._matched, self.targets)
        self.targets = {}
        return nbytes
