"""The page: static files that need nothing from elsewhere.

``DRAWING`` and ``page.css`` draw the value of ``run_view.RunView``: in the report,
which has them inside, and on the service's page, which asks for them.
"""

from __future__ import annotations

from pathlib import Path

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "basics.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "picture.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
DRAWING = ("basics.js", "charts.js", "picture.js")  # in this order
# Of the page as the service serves it: its own files, its own API, nothing else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def static(name: str) -> bytes:
    """The content of a file of ``TYPES``. Raises KeyError for any other name."""
    if name not in TYPES:
        raise KeyError(name)
    return (Path(__file__).parent / name).read_bytes()
