"""What the formats may import: neither torch nor click nor rich; what derives Definitions, torch but no face."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

import kcap.schemas

refused, apart = sys.argv[1].split(","), sys.argv[2]


class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError(f"{name} is imported")


sys.meta_path.insert(0, Refuse())
for module in pkgutil.walk_packages(kcap.schemas.__path__, "kcap.schemas.", onerror=lambda name: None):
    if apart and module.name.startswith(apart):
        continue
    importlib.import_module(module.name)
    print(module.name)
"""


def imported(refused: str, apart: str) -> set[str]:
    """The modules of schemas, without those of `apart`, once each was imported where `refused` are not to be had."""
    ran = subprocess.run([sys.executable, "-c", IMPORT_ALL, refused, apart], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return {name.removeprefix("kcap.schemas.") for name in ran.stdout.split()}


def test_formats_import_neither_torch_nor_click_nor_rich() -> None:
    modules = imported("torch,click,rich", "kcap.schemas.derive")
    folders = {name.partition(".")[0] for name in modules}
    assert folders >= {"files", "recording", "flashinfer", "backendbench", "results", "merge", "diff", "validation"}
    assert {"recording.recording", "flashinfer.dataset", "backendbench.grammar", "validation.formats"} <= modules


def test_what_derives_definitions_imports_neither_click_nor_rich() -> None:
    assert "derive.families.attention.gqa_paged" in imported("click,rich", "")


def test_the_phases_that_an_engine_imports_are_plain_python() -> None:
    code = "import sys, kcap.schemas.recording.phases; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "numpy", "orjson"} & set(ran.stdout.split())
