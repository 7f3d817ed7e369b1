"""CONTRIBUTING.md names files and things in them: they exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)


def test_files_named_exist() -> None:
    named = [word for text in QUOTED for word in text.split() if "/" in word]
    files = [word for word in named if not word.startswith(".venv")]
    assert len(files) > 20
    assert [word for word in files if not (ROOT / word).exists()] == []


def test_names_are_in_the_project() -> None:
    names = {text for text in QUOTED if re.fullmatch(r"[A-Za-z_]+", text)}
    sources = [*(ROOT / "elastic_ft").rglob("*.py"), *(ROOT / "chaos").rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    assert len(names) > 10
    assert names - words == set()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([\w-]+)", PAGE))
    assert targets and all(re.search(rf"\b{re.escape(t)}\b", makefile) for t in targets)


def test_make_soak_runs_each_tier_that_has_tests_for_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    run = re.search(r"^SOAK := (.*)$", makefile, re.MULTILINE)
    marked = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.soak" in path.read_text() and path.parent.name != "tidy"
    }
    assert run is not None and set(run[1].split()) == marked
