"""Each mutation stands for something in the code as it is."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["core", "blinded"])
def test_what_is_replaced_is_there_once(name: str) -> None:
    found = tomllib.loads((ROOT / "tests" / "mutants" / f"{name}.toml").read_text())["mutant"]
    assert len({mutant["name"] for mutant in found}) == len(found) > 10
    texts = {m["file"]: (ROOT / "elastic_ft" / m["file"]).read_text() for m in found}
    assert [m["name"] for m in found if texts[m["file"]].count(m["old"]) != 1] == []
