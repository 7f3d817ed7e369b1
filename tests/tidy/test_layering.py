"""Imports run one way, and the core knows nothing but itself (DESIGN section 3)."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "elastic_ft"

# The floors, from the ground up: a package imports those below its own, and itself.
FLOORS = (
    ("errors",),
    ("torch_private",),
    ("core",),
    ("config", "faults"),
    ("models", "sim", "storage"),
    ("data", "observe", "transport"),
    ("groups", "keeper"),
    ("state",),
    ("engines",),
    ("controller", "worker"),  # two processes: neither knows the other's code
    ("hosts",),
    ("service",),
    ("training",),  # what a loop of the user's calls
    ("transformers",),  # a loop of one's own: Hugging Face's
    ("cli",),
)
BELOW = {
    name: {n for f in FLOORS[:i] for n in f} for i, names in enumerate(FLOORS) for name in names
}
MAY_IMPORT = {
    **BELOW,
    "core": {"errors"},
    "sim": {"errors", "core"},
    "keeper": BELOW["keeper"] - {"torch_private", "models", "data"},
}
HOSTS_ONLY = "ray"  # third party, known to hosts and to what stands above it
TORCH_FREE = ("config", "core", "keeper", "observe", "sim", "storage", "transport")
IMPURE = {"time", "datetime", "random", "secrets", "uuid", "os", "logging", "threading", "asyncio"}
IMPURE |= {"socket", "subprocess", "tempfile", "pathlib", "shutil", "multiprocessing"}
CORE_INPUT_OUTPUT = {"open", "print", "input", "eval", "exec", "__import__"}

# Tests that sleep, and why they must: elsewhere wait on a condition (DESIGN section 8).
MAY_SLEEP = {
    "tests/multiproc/conftest.py": "polls for a condition, with a deadline",
    "tests/multiproc/tiny.py": "a gate that a test opens, with a deadline",
    "tests/oneproc/test_lifeline.py": "polls for a condition, with a deadline",
    "tests/ray/test_service.py": "polls for a condition, with a deadline",
    "tests/ray/trial.py": "polls for a condition, with a deadline",
}

MODULES = sorted(PACKAGE.rglob("*.py"))
CORE = sorted((PACKAGE / "core").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CHAOS = sorted((ROOT / "chaos").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
PRIVATE = re.compile(r"\._[a-z]")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    """The first name below ``elastic_ft``: a sub-package or a top-level module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, absolute dotted name) of every import, those inside functions included."""
    package, found = path.relative_to(ROOT).parts[:-1], list[tuple[int, str]]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    return tuple(found)


@cache
def calls_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name as written) of every call."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple((n.lineno, ast.unparse(n.func)) for n in nodes if isinstance(n, ast.Call))


def breaches(paths: list[Path], layer_may: dict[str, set[str]]) -> list[str]:
    found = []
    for path in paths:
        layer = layer_of(path)
        if layer not in layer_may:  # cli/main.py and the like stand on top
            continue
        for line, imported in imports_of(path):
            top, _, rest = imported.partition(".")
            below = rest.partition(".")[0]
            if top == "chaos" or (top == "elastic_ft" and below not in {layer, *layer_may[layer]}):
                found.append(f"{name_of(path)}:{line}: {layer} may not import {imported}")
    return found


def test_imports_run_one_way() -> None:
    assert breaches(MODULES, MAY_IMPORT) == []


def test_every_sub_package_has_its_place() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= MAY_IMPORT.keys(), "say in MAY_IMPORT what a new sub-package may import"


def test_the_picture_of_the_floors_is_theirs() -> None:
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1].splitlines()
    drawn = {name: y for y, line in enumerate(picture) for name in re.findall(r"\w+", line[:25])}
    packages = [[n for n in floor if (PACKAGE / n).is_dir()] for floor in reversed(FLOORS)]
    heights = [drawn[name] for floor in packages for name in floor]
    assert heights == sorted(heights)


def test_a_breach_would_be_seen() -> None:
    """The check itself: turned around, the rule is broken by what is there."""
    assert breaches(CORE, {"core": set()})


def test_only_the_host_knows_ray() -> None:
    found = [
        f"{name_of(path)}:{line}: {imported}"
        for path in MODULES
        if layer_of(path) not in ("hosts", "service", "cli")
        for line, imported in imports_of(path)
        if imported.split(".")[0] == HOSTS_ONLY
    ]
    assert found == []


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_is_pure(path: Path) -> None:
    """Standard library only; no clock, randomness, environment, logging, files or threads."""
    tops = {(line, name.split(".")[0]) for line, name in imports_of(path)}
    foreign = {(n, top) for n, top in tops if top not in {*sys.stdlib_module_names, "elastic_ft"}}
    assert not foreign, "core imports the standard library and itself only"
    assert not {(n, top) for n, top in tops if top in IMPURE}
    assert not {(n, call) for n, call in calls_of(path) if call in CORE_INPUT_OUTPUT}


def test_core_imports_without_any_third_party_package() -> None:
    """In an interpreter without site-packages: no torch, no ray, no numpy, nothing."""
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in CORE]
    program = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
for name in ("torch", "ray", "numpy", "pydantic"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(name + " can be imported: this shows nothing")
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_tests_wait_on_conditions_and_do_not_sleep() -> None:
    found = [
        f"{name_of(path)}:{line}"
        for path in TESTS
        for line, call in calls_of(path)
        if call in ("time.sleep", "sleep") and name_of(path) not in MAY_SLEEP
    ]
    assert found == [], "wait on a condition with a deadline, or say why in MAY_SLEEP"


def test_no_excuse_outlives_its_reason() -> None:
    asleep = {name_of(path) for path in TESTS for _, call in calls_of(path) if "sleep" in call}
    assert MAY_SLEEP.keys() <= asleep


# Of packages that only some jobs need: for objects in S3 and the like, Parquet, texts, a cluster.
SOME_JOBS = ("obstore", "pyarrow", "tokenizers", "ray", "deepspeed", "transformers", "s3fs")


def test_a_process_of_a_job_imports_what_every_job_needs() -> None:
    """The others take seconds and tens of MB in each of them, and need not be there."""
    program = f"""
import sys
import elastic_ft.hosts.local, elastic_ft.controller.controller
import elastic_ft.worker.worker, elastic_ft.keeper.node_keeper
print(*(name for name in {SOME_JOBS!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == []


def test_nobody_imports_a_private_name_of_another_module() -> None:
    found = [
        f"{name_of(path)}:{line}: {imported}"
        for path in [*MODULES, *CHAOS, *TESTS, *BENCHMARKS]
        for line, imported in imports_of(path)
        if imported.startswith(("elastic_ft.", "chaos.")) and PRIVATE.search(imported)
    ]
    assert found == []


def test_no_file_has_the_name_of_another() -> None:
    names = Counter(path.name for path in MODULES)
    twice = {name for name, times in names.items() if times > 1}
    assert twice <= {"__init__.py", "__main__.py", "base.py"}


# Whole circles of files, each with the reason. None at run time, or Python would not import them.
MAY_CIRCLE: tuple[frozenset[str], ...] = ()


def test_files_import_one_another_in_no_circle() -> None:
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in [*MODULES, *CHAOS]}
    graph = {
        name: {
            module
            for _, imported in imports_of(path)
            for module in (imported, imported.rpartition(".")[0])
            if module in files and module != name
        }
        for name, path in files.items()
    }
    sorter = TopologicalSorter(
        {
            name: {m for m in needed if not any({m, name} <= circle for circle in MAY_CIRCLE)}
            for name, needed in graph.items()
        }
    )
    sorter.prepare()  # raises CycleError, which names the circle


def test_tiers_that_run_together_have_no_two_files_of_a_name() -> None:
    """pytest takes the second for the first: "import file mismatch"."""
    together = re.search(r"^ALONE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert together is not None
    tiers = together[1].split()
    names = Counter(p.name for tier in tiers for p in (ROOT / "tests" / tier).glob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def types_of(code: str) -> Iterator[str]:
    """Public names of a module's classes, and of its other names for types; no type variables."""
    for node in ast.parse(code).body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                if re.fullmatch(r"[A-Z][a-z]\w*", name) and made != "TypeVar":
                    yield name


def test_no_public_type_has_the_name_of_another() -> None:
    names = Counter(name for path in [*MODULES, *CHAOS] for name in types_of(path.read_text()))
    assert [n for n, times in names.items() if times > 1 and not n.startswith("_")] == []


def test_what_counts_as_a_type() -> None:
    code = "class A: ...\nLine = dict[str, Any]\nItem = TypeVar('Item')\nMAX = 1\nlog = f()"
    assert [*types_of(code)] == ["A", "Line"]


# Where each module has one: what it is called by says which. Or two that stand for each other.
GENERIC = frozenset({"main", "run", "export", "fill", "forget", "leave"})
INTERFACES = frozenset({"explain", "one_line"})
COMMANDS = ("elastic_ft/cli/", "chaos/cli.py")  # their functions are called as users call them


def functions_of(code: str) -> Iterator[str]:
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_no_public_function_has_the_name_of_another() -> None:
    names = Counter(
        name
        for path in [*MODULES, *CHAOS]
        if not str(path.relative_to(ROOT)).startswith(COMMANDS)
        for name in functions_of(path.read_text())
        if not name.startswith("_")
    )
    twice = {name for name, times in names.items() if times > 1}
    assert twice - GENERIC - INTERFACES == set(), "call it by its meaning"
    assert names.keys() >= GENERIC | INTERFACES
