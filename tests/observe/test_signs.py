"""Signs of life, wherever the run folder is."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from elastic_ft.observe import alive


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory://{}"])
def test_who_sees_to_a_job_shows_it_wherever_its_folder_is(tmp_path: Path, url: str) -> None:
    """``attach`` took a job with a remote folder for dead, while a keeper started its launcher."""
    run_url = url.format(tmp_path if "memory" not in url else uuid.uuid4().hex)
    assert alive.last_sign(run_url) is None
    alive.show(run_url)
    sign = alive.last_sign(run_url)
    assert sign is not None
    assert (sign.pid, sign.in_charge, sign.gone) == (os.getpid(), False, False)
