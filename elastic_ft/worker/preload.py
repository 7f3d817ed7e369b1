"""Imported once for all that a launcher of ``hosts.local`` forks: no threads, no CUDA."""

from elastic_ft.worker import birth  # isort: skip  # it tells when this began
from elastic_ft import torch_private
from elastic_ft.worker import worker

torch_private.forget_meshes()
torch_private.import_lazy_parts()

__all__ = ["birth", "worker"]
