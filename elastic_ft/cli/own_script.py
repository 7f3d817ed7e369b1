"""What a training script gives to ``elastic_ft.init``: it is needed before any worker runs.

Mostly it can be read. Where it is computed (from the command line, say) the script is begun in a
process of its own, which ends at that call.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from elastic_ft.cli.progress import say
from elastic_ft.errors import ConfigError

BEGIN_S = 600.0  # for a script to come to its init(): a trainer's has loaded its model by then
TELL_S = 20.0  # after which whoever waits is told for what
PROGRAM = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
PROGRAM += "from elastic_ft.cli.own_script import begin_script; begin_script(sys.argv[2:])"
ANSWER_FD = "ELASTIC_FT_INIT_FD"
TRAINERS = "elastic_ft.transformers"


def calls_init(script: Path) -> bool:
    """Raises ConfigError."""
    tree = _parsed(script)
    return bool(_init_calls(tree)) or _has_trainer(tree)


def init_of(script: Path, arguments: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """The job file and the sections that the script gives to ``elastic_ft.init``.

    Raises ConfigError.
    """
    tree = _parsed(script)
    calls = _init_calls(tree)
    if not calls and _has_trainer(tree):
        return _as_begun(script, arguments)
    if not calls:
        raise ConfigError(
            f"{script}: never calls elastic_ft.init(): nothing would train elastically; see "
            "docs/bring-your-own.md"
        )
    call = calls[0]
    try:
        file = ast.literal_eval(call.args[0]) if call.args else ""
        said = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    except ValueError:
        return _as_begun(script, arguments)
    if None in said:  # **sections
        return _as_begun(script, arguments)
    return _checked(script, [file, said])


def _parsed(script: Path) -> ast.Module:
    try:
        return ast.parse(script.read_bytes(), str(script))
    except OSError as error:
        raise ConfigError(f"{script}: cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{script}: is no Python: {error}") from None


def _init_calls(tree: ast.Module) -> list[ast.Call]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_init(n.func, tree)]


def _has_trainer(tree: ast.Module) -> bool:
    """Whether the script imports what calls ``init`` for it."""
    return any(f"{name}.".startswith(f"{TRAINERS}.") for name in _imported(tree))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Full names of modules, and of what is taken out of them."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _is_init(function: ast.expr, tree: ast.Module) -> bool:
    """By whatever names the script has imported it."""
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = set()
    for statement in imported:
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                if (statement.module, alias.name) == ("elastic_ft", "init"):
                    names.add(alias.asname or alias.name)
            elif alias.name == "elastic_ft":
                names.add(f"{alias.asname or alias.name}.init")
            elif alias.name.startswith("elastic_ft.") and alias.asname is None:
                names.add("elastic_ft.init")
    return isinstance(function, ast.Name | ast.Attribute) and ast.unparse(function) in names


# ------------------------------------------------------------------------------- begun


def _as_begun(script: Path, arguments: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    with tempfile.TemporaryFile() as answer:  # no pipe: what the script forks might hold it open
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(script), *arguments],
            env=os.environ | {ANSWER_FD: str(answer.fileno())},
            pass_fds=[answer.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it says the same again when it trains
        )
        try:
            code = _awaited(process, script)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{script}: did not call elastic_ft.init() within {BEGIN_S:g} s: call it early, or "
                "give it literal values"
            ) from None
        finally:
            process.kill()
            process.wait()
        answer.seek(0)
        told = answer.read()
    if not told:
        raise ConfigError(f"{script}: ended before it called elastic_ft.init(), with code {code}")
    return _checked(script, json.loads(told))


def _awaited(process: subprocess.Popen[bytes], script: Path) -> int:
    """Its exit code. Raises TimeoutExpired."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(TELL_S)
    say(f"{script.name} has run for {TELL_S:g} s and not called elastic_ft.init(): waiting for it")
    return process.wait(BEGIN_S - TELL_S)


def _checked(script: Path, told: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(told, str):
        raise ConfigError(f"{script}: {told}")
    job, said = told
    if isinstance(job, dict):  # a mapping like a job file
        job, said = "", job | said
    if not isinstance(job, str):
        raise ConfigError(f"{script}: elastic_ft.init() takes a job file's path, found {job!r:.80}")
    return job, said


def begin_script(arguments: list[str]) -> None:
    """In the script's process: runs it as far as its ``init``, tells what that is given, ends."""
    from elastic_ft.training import context  # torch: only where the script has it, too

    answer = int(os.environ.pop(ANSWER_FD))

    def init(job: Any = None, **sections: Any) -> NoReturn:
        try:
            told = json.dumps(["" if job is None else job, sections], default=_plain)
        except (TypeError, ValueError) as error:
            told = json.dumps(f"elastic_ft.init() is given what a job file can't say: {error}")
        with open(answer, "w") as line:
            line.write(told)
        os._exit(0)  # nothing of the script's is to run any more, whatever it catches

    vars(sys.modules["elastic_ft"])["init"] = init
    vars(context)["init"] = init  # elastic_ft.transformers calls it there
    script = arguments[0]
    sys.argv = arguments
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _plain(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
