"""Small documents, and a folder of them."""

from __future__ import annotations

from pathlib import Path

DOCUMENTS = [
    f"Document {n}: the quick brown fox jumps over {n} lazy dogs.\n" * 8 for n in range(20)
]


def write_texts(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number:02}.txt").write_text(text)
    return folder
