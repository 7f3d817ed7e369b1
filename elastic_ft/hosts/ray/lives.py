"""Which of its lives an actor is in."""

from __future__ import annotations

import warnings

import ray


def is_restarted_actor() -> bool:
    """Whether Ray has made the actor that calls again. Ray asks its own deprecated names for it,
    and its warning of that would be the first line of each actor's log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
