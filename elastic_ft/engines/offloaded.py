"""An optimizer in host memory (ZeRO-Offload): gradients go down, it steps there, weights come up.

The masters and all that is kept for them are the state, so a snapshot of it is copied from host
memory to host memory, and a new layout is filled there. What the device has of it is a copy of the
weights. It is one for every layout: nothing that FSDP2's own offload does, which keeps shards of
weights in host memory, too, and sends them up again for each forward and backward of a micro-batch
(``docs/adr/0011-optimizer-in-host-memory.md``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from elastic_ft import torch_private
from elastic_ft.engines.modules import local_part


class Offloaded:
    """Masters, uninitialised, of those of ``parameters`` that are trained.

    Attributes:
        masters: by name, in host memory; page-locked if ``device`` is a GPU. Cut as parameters are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._live = {name: p for name, p in parameters.items() if p.requires_grad}
        self._device, self._pinned = device, device.type == "cuda"
        self.masters = {n: nn.Parameter(self._like(p.detach())) for n, p in self._live.items()}
        self._gradients: dict[str, torch.Tensor] = {}

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        made = torch.empty(local.shape, dtype=local.dtype, pin_memory=self._pinned)
        return torch_private.as_part_of(tensor, made)

    def take_gradients(self) -> None:
        """Copies them down, and lets go of them on the device."""
        for name, live in self._live.items():
            if live.grad is None:
                self.masters[name].grad = None
                continue
            if name not in self._gradients:
                self._gradients[name] = self._like(live.grad)
            target = self._gradients[name]
            local_part(target).copy_(local_part(live.grad), non_blocking=True)
            self.masters[name].grad = target
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()
        for live in self._live.values():
            live.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Copies them up. What is queued on the device after this sees them."""
        for name, live in self._live.items():
            local_part(live).copy_(local_part(self.masters[name]), non_blocking=True)
