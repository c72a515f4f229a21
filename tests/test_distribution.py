"""The sdist holds the repository, and what is installed from it works outside the clone.

Nothing is downloaded: the environment's setuptools builds, and the environment that kcap is installed into borrows the
packages of this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("bench", "capture", "replay", "schemas")  # kcap/NAME in the wheel
BORROWED = ("click", "numpy", "orjson", "pyarrow", "pydantic", "rich", "safetensors", "torch")
GENERATED = ("PKG-INFO", "setup.cfg", "kcap.egg-info", "build")

pytestmark = pytest.mark.slow


def _reason_not_to_build() -> str | None:
    """Asked of the metadata: looking for pip as a module changes which distutils is imported from then on."""
    versions = {name: _version_of(name) for name in ("pip", "setuptools")}
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        return f"needs {' and '.join(lacking)}"
    if int((versions["setuptools"] or "0").partition(".")[0]) < 77:
        return f"needs setuptools 77 or newer, this is {versions['setuptools']}"
    return None


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if reason := _reason_not_to_build():
    pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Built:
    source: Path
    sdist: Path
    unpacked: Path
    wheel: Path


@dataclass(frozen=True)
class Installed:
    """An environment of its own, and a folder outside the clone."""

    python: Path
    folder: Path

    def run(self, *command: object, code: int = 0) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environ["PATH"] = f"{self.python.parent}:{environ['PATH']}"
        ran = subprocess.run([*map(str, command)], cwd=self.folder, env=environ, capture_output=True, text=True)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout


def source_files() -> Iterator[Path]:
    """The files of this repository, links among them: of a clone what git knows or would take, else all."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    ran = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode == 0 and ran.stdout:
        return (Path(name) for name in ran.stdout.split("\0") if name and os.path.lexists(ROOT / name))
    return (path for path in files_below(ROOT) if path.parts[0] not in GENERATED and "__pycache__" not in path.parts)


def build(kind: str, source: Path, output: Path) -> Path:
    """The sdist or the wheel of this source, as `pip` has setuptools build it."""
    output.mkdir()
    program = f"from setuptools.build_meta import build_{kind} as build; build({str(output)!r})"
    ran = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "clone"
    for path in source_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path, follow_symlinks=False)
    sdist = build("sdist", source, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(source, sdist, unpacked, build("wheel", unpacked, folder / "wheel"))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment without pip, beside the packages that kcap needs."""
    folder = tmp_path_factory.mktemp("outside")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-warn-script-location", "--quiet")
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(built.wheel)]
    ran = subprocess.run(installing, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    borrowed = {str(Path(str(importlib.import_module(name).__file__)).parents[1]) for name in BORROWED}
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return Installed(python, folder)


def files_below(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        links = [name for name in folders if Path(directory, name).is_symlink()]
        yield from (Path(directory, name).relative_to(root) for name in (*names, *links))


def test_the_sdist_holds_the_repository(built: Built) -> None:
    unpacked, source = (set(files_below(root)) for root in (built.unpacked, built.source))
    assert {path for path in unpacked ^ source if path.parts[0] not in GENERATED} == set()
    assert {name: os.readlink(built.unpacked / "kcap" / name) for name in LINKED} == {
        name: f"../{name}" for name in LINKED
    }


def test_the_wheel_holds_every_file_of_the_package(built: Built) -> None:
    package = {
        (Path("kcap") / path if path.parts[0] in LINKED else path).as_posix()
        for path in files_below(built.source)
        if path.parts[0] in (*LINKED, "kcap") and path.name != "README.md" and not (built.source / path).is_symlink()
    }
    held = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    assert held == package


def test_what_is_installed_is_not_the_clone(installed: Installed) -> None:
    where = Path(installed.run(installed.python, "-c", "import kcap.capture; print(kcap.capture.__file__)").strip())
    assert where.is_relative_to(installed.folder)
    assert "record" in installed.run("kcap", "--help")


def test_the_bundled_models_are_found(installed: Installed) -> None:
    program = "from kcap.capture.controller.models import find_config as f; print(f('kcap/tiny-llama') / 'config.json')"
    config = Path(installed.run(installed.python, "-c", program).strip())
    assert config.is_file() and config.is_relative_to(installed.folder)


PROGRAM = """
import sys
import torch
import kcap

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
if len(sys.argv) > 1:
    with kcap.record(sys.argv[1], recorder="native") as recorder, recorder.step("prefill"):
        model(torch.zeros(4, 8))
    print(kcap.load(sys.argv[1]).metadata.recorder)
else:
    model(torch.zeros(4, 8))
"""


def test_the_native_recorder_is_built_from_what_is_installed(installed: Installed) -> None:
    """Or taken from the user's cache, where the very same sources were compiled before."""
    (installed.folder / "inside.py").write_text(PROGRAM)
    assert installed.run(installed.python, "inside.py", "inside.kcap") == "['RecordFunction']\n"


def test_a_program_is_recorded_shown_validated_and_replayed(installed: Installed) -> None:
    (installed.folder / "program.py").write_text(PROGRAM)
    installed.run("kcap", "record", "-o", "program.kcap", "--", installed.python, "program.py")
    assert "aten::linear" in installed.run("kcap", "show", "program.kcap", "--by", "operator")
    installed.run("kcap", "validate", "program.kcap")
    assert "aten::linear" in installed.run("kcap", "replay", "program.kcap", "--seconds", "0.001")
