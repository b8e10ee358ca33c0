"""Writes the demo's text: the sources of Python's standard library, one file a document.

usage: demo_text.py FOLDER      makes FOLDER/train/*.txt and FOLDER/validation/*.txt, once
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

LEAST_TRAIN_BYTES = 3_000_000
HELD_OUT_EVERY = 20  # one file in so many is for validation
# Packages that are not the library's, tests, and tables of characters.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings"}
LEAST_BYTES = 500  # shorter ones are stubs


def library_sources(library: Path) -> list[Path]:
    """Python files of the library proper, in an order that does not depend on the machine."""
    sources = [
        path
        for path in library.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(library).parts)
        and path.stat().st_size >= LEAST_BYTES
    ]
    return sorted(sources, key=lambda path: path.relative_to(library).as_posix())


def write_text(library: Path, folder: Path) -> dict[str, tuple[int, int]]:
    """Copies the sources; returns (files, bytes) for each part."""
    written = {"train": (0, 0), "validation": (0, 0)}
    for part in written:
        (folder / part).mkdir(parents=True)
    for index, source in enumerate(library_sources(library)):
        part = "validation" if index % HELD_OUT_EVERY == 0 else "train"
        name = ".".join(source.relative_to(library).with_suffix(".txt").parts)
        shutil.copyfile(source, folder / part / name)
        files, size = written[part]
        written[part] = (files + 1, size + source.stat().st_size)
    return written


def main() -> None:
    folder = Path(sys.argv[1])
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    library = Path(sysconfig.get_path("stdlib"))
    written = write_text(library, unfinished)
    if written["train"][1] < LEAST_TRAIN_BYTES:
        shutil.rmtree(unfinished)
        sys.exit(f"demo: {library} lacks the library's sources: install your system's python3")
    unfinished.rename(folder)
    for part, (files, size) in written.items():
        print(f"demo: {part}: {size / 1e6:.1f} MB in {files} files under {folder / part}")


if __name__ == "__main__":
    main()
