"""Objects that a job file names by import path, ``package.module:attribute``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from elastic_ft.errors import UsageError, one_line


def import_object(path: str, key: str, error: type[UsageError]) -> Any:
    """Returns the object at ``path``; ``key`` is the job file's key that holds it.

    The working directory is searched too, as uvicorn and celery do, so that a module beside the
    job needs no packaging. Raises ``error``, one line: what was found instead.
    """
    module_name, separator, attributes = path.partition(":")
    if not (module_name and separator and attributes):
        raise error(f"{key}: expected package.module:name, found {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:  # a module may raise anything while it is imported
        raise error(f"{key}: cannot import {module_name!r}: {one_line(cause)}") from cause
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            names = ", ".join(name for name in dir(found) if not name.startswith("_")) or "nothing"
            raise error(
                f"{key}: {path!r}: no {attribute!r} in {module_name}; found {names[:200]}"
            ) from None
    return found


def call_object(path: str, kwargs: dict[str, Any], key: str, error: type[UsageError]) -> Any:
    """Returns what the callable at ``path`` returns for ``kwargs``. Raises ``error``, one line."""
    function = import_object(path, key, error)
    if not callable(function):
        raise error(f"{key}: expected a callable, {path!r} is {type(function).__name__}")
    try:
        return function(**kwargs)
    except (Exception, SystemExit) as cause:  # the user's code may raise anything
        raise error(f"{key}: {path}(**kwargs) failed: {one_line(cause)}") from cause
