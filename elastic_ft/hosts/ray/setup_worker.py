"""On local nodes, what Ray starts for a worker that has a runtime environment: as Ray's script of
this name does, but without importing Ray first, which is most of a forked worker's start.

``--language=PYTHON --serialized-runtime-env-context={...} default_worker.py ...``
"""

import argparse
import json
import os
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

OURS = {"env_vars", "py_executable"}


def expanded(variables: dict[str, str]) -> dict[str, str]:
    """With the values of others in them, one after the other, as Ray has it."""
    for name, value in variables.items():
        known = os.path.expandvars(value)
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", known)
    return dict(os.environ)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language", default="")
    said, arguments = parser.parse_known_args()
    context = json.loads(said.serialized_runtime_env_context)
    asked = {name for name, value in context.items() if value}
    if said.language != "PYTHON" or asked - OURS:
        run_rays_own()
        return
    command = shlex.split(context.get("py_executable") or shlex.quote(sys.executable))
    os.execvpe(command[0], [*command, *arguments], expanded(context.get("env_vars") or {}))


def run_rays_own() -> None:
    found = find_spec("ray")
    assert found is not None and found.origin is not None, "Ray has started this"
    script = Path(found.origin).parent / "_private/workers/setup_worker.py"
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
