"""Checks that a folder of src/ includes only headers of the folders that its libraries link (LIBRARIES in its
CMakeLists.txt, and what those link in turn). Static libraries would let a wrong edge pass until much later."""

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path("src")
LIBRARY = re.compile(r"hcp_library\(\s*(\w+)([^)]*)\)")
INCLUDE = re.compile(r'^\s*#\s*include\s+"(\w+)/', re.MULTILINE)


def linked_folders() -> dict[str, set[str]]:
    """For each folder, the folders whose libraries its own ones link directly."""
    folder_of: dict[str, str] = {}
    libraries_of: dict[str, list[str]] = {}
    for lists in SOURCE.glob("*/CMakeLists.txt"):
        folder = lists.parent.name
        for name, arguments in LIBRARY.findall(re.sub(r"#.*", "", lists.read_text())):
            folder_of[f"hcp_{name}"] = folder
            _, _, libraries = arguments.partition("LIBRARIES")
            libraries_of.setdefault(folder, []).extend(libraries.split())
    return {
        folder: {folder_of[library] for library in libraries if library in folder_of}
        for folder, libraries in libraries_of.items()
    }


def reachable(folder: str, links: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(links[current])
    return found


def main() -> int:
    links = linked_folders()
    allowed = {folder: reachable(folder, links) for folder in links}
    listed = subprocess.run(["git", "ls-files", "src"], check=True, capture_output=True, text=True)
    failed = False
    for path in map(Path, listed.stdout.split()):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"} or not path.exists():
            continue
        folder = path.parts[1]
        for included in INCLUDE.findall(path.read_text()):
            if included in links and included not in allowed[folder]:
                failed = True
                may = ", ".join(sorted(allowed[folder]))
                print(f"{path}: includes {included}/, but src/{folder} may use {may} only")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
