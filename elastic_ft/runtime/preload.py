"""Imported once by the fork server of ``local``: what every worker needs, and no threads."""

from elastic_ft.config import OptimizerConfig
from elastic_ft.runtime import compat, worker
from elastic_ft.runtime.engines.native import warm_optimizer

compat.forget_meshes()
warm_optimizer(OptimizerConfig())

__all__ = ["worker"]
