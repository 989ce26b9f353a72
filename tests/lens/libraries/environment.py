"""Set up the environment of the libraries: `python -m tests.lens.libraries.environment .venv-libraries`.

It stands beside the environment that runs this file and sees all its packages, PyTorch among them. A library that is
here already in another version is installed in the new environment alone. Nothing is installed with its dependencies,
so no second PyTorch comes with it: requirements.txt lists every package by name and version. A package that does not
install is reported, and its cases are "not installed".
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
NEWEST = "newest-transformers"  # folder of the newest transformers, within the environment
FORBIDDEN = re.compile(r"(torch|triton|nvidia-.*)==")


def requirements(path: Path = REQUIREMENTS) -> list[str]:
    """Return the pinned packages of a requirements file, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf8").splitlines())
    found = [line for line in lines if line]
    if torches := [line for line in found if FORBIDDEN.match(line)]:
        raise ValueError(f"the libraries share the PyTorch of the tests; remove {torches} from {path.name}")
    return found


def pip(*arguments: str) -> bool:
    """Run pip of this environment; return whether it succeeded."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=False).returncode == 0


def create(folder: Path) -> Path:
    """Make an environment that sees the packages of this one after its own; return its Python."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here = sysconfig.get_path("purelib")
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf8")
    return folder / "bin" / "python"


def install(python: Path, packages: list[str]) -> list[str]:
    """Install all packages at once, or one by one if that fails; return those that do not install."""
    command = ["--python", str(python), "install", "--quiet", "--no-deps"]
    if pip(*command, *packages):
        return []
    return [each for each in packages if not pip(*command, each)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    python = create(folder)
    failed = install(python, requirements())
    if not pip("install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder / NEWEST), "transformers"):
        failed.append("transformers (newest)")
    if failed:
        print(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
