"""Hugging Face's trainers as a training loop of one's own: see docs/hugging-face.md."""

from __future__ import annotations

from importlib.util import find_spec

from elastic_ft.errors import UsageError

for _needed in ("transformers", "accelerate"):
    if find_spec(_needed) is None:
        raise UsageError(
            f"elastic_ft.transformers: needs {_needed}: pip install 'elastic-ft[huggingface]'"
        )

from elastic_ft.transformers.mixin import ElasticMixin, Trainer  # noqa: E402

__all__ = ["ElasticMixin", "Trainer"]
