"""The wheel and the sdist: built, installed where nothing of this clone is, and used as a new user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parents[1]
STATIC = [f"regard/views/web/dist/{name}" for name in ("app.css", "app.js", "index.html")]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling, which builds packages, is not here"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(out), cwd=ROOT)
    return out


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_its_types_and_the_viewer(built):
    [wheel] = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names
    assert set(STATIC) <= names
    assert "regard/py.typed" in names
    assert not [name for name in names if "node_modules" in name or name.startswith(("tests", "docs"))]
    assert all(name.startswith("regard/views/web/dist/") for name in names if name.startswith("regard/views/web/"))


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist"), cwd=source)
    [again] = (tmp_path / "dist").glob("*.whl")
    contents = [{item.filename: item.CRC for item in zipfile.ZipFile(path).infolist()} for path in (wheel, again)]
    assert contents[0] == contents[1]


def test_the_wheel_works_where_nothing_else_of_ours_is(built, tmp_path):
    """An empty environment that sees the dependencies of this one, and not its editable install."""
    [wheel] = built.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=False)
    python, site = tmp_path / "empty" / "bin" / "python", sysconfig.get_path("purelib")
    own = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (own / "dependencies.pth").write_text(site)  # a path named here is searched, the .pth files in it are not
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", "--force-reinstall", "--ignore-installed", str(wheel), cwd=tmp_path)

    assert run(str(python.with_name("regard")), "--version", cwd=tmp_path).strip() == f"regard {regard.__version__}"
    code = """
import json, torch, regard
from regard.views.viewer.server import STATIC, read_bundled
q, k, v = torch.randn(3, 1, 2, 9, 8)
out = regard.attend(q, k, v, mask=regard.Causal())
same = torch.allclose(out, regard.weights(q, k, mask=regard.Causal()) @ v, atol=1e-6)
print(json.dumps([regard.__file__, same, [len(read_bundled(name)) for name, _ in STATIC.values()]]))
"""
    file, same, sizes = json.loads(run(str(python), "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(own)
    assert same
    assert min(sizes) > 100
