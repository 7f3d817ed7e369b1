"""Imported once by the fork server of ``local``: what every worker needs, no threads, no CUDA."""

from elastic_ft.runtime import compat, worker

compat.forget_meshes()
compat.import_lazy_parts()

__all__ = ["worker"]
