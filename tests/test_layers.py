"""How the package is laid out: imports point down, in no circle; formats and an engine's process stay light.

The rules are read from the source by `ast`: they hold for imports inside functions and under TYPE_CHECKING, too.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the lowest layer to the highest; the longest prefix of a module's name says which it is in.
LAYERS = [
    ("kcap.errors", "kcap.version", "kcap.system"),
    ("kcap.schemas",),
    ("kcap.show",),
    ("kcap.capture", "kcap.replay"),
    ("kcap.bench",),
    ("kcap.report",),
    ("kcap.commands",),
    ("kcap",),
]
# A reader of files needs neither torch nor a terminal: all of schemas/ but what derives Definitions.
NOT_FOR_FORMATS = ("torch", "rich", "click")
# What runs in an engine's process, and what it may import beside the standard library: an adapter imports its engine.
INSIDE_ENGINES = ("activate", "session", "startup", "engines", "hooks", "window", "taps", "recorder")
INSIDE_ENGINES += ("turns.blocks", "turns.exchange", "turns.log", "turns.middleware")
FOR_ENGINES = ("torch", "orjson", "vllm", "sglang", "tensorrt_llm", "tvm_ffi", "huggingface_hub")
MOST_ENTRIES = 12
CROWDED = {
    "kcap/commands": "one file a subcommand",
    "capture/recorder/native": "headers of one translation unit, dispatcher.cpp; each is one part of the recorder",
    "schemas/json": "one JSON Schema a format",
}


@dataclass(frozen=True)
class Import:
    """One `import` of a module of the package."""

    importer: str
    module: str
    at_top: bool  # runs when the importer is imported
    only_types: bool  # under TYPE_CHECKING


class Package:
    """The modules of a folder that is laid out as the repository is, and what each imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {_module_name(path): root / path for path in sorted(_python_files(root))}
        self.imports = [item for name, path in self.sources.items() for item in self._imports_of(name, path)]

    def _imports_of(self, importer: str, path: Path) -> Iterator[Import]:
        for node, at_top, only_types in _import_nodes(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif node.level == 0 and node.module:
                full_names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [full if full in self.sources else node.module for full in full_names]
            else:
                raise AssertionError(f"{path}:{node.lineno}: a relative import")
            yield from (Import(importer, module, at_top, only_types) for module in dict.fromkeys(modules))

    def upward(self) -> list[str]:
        """Imports of a layer above, or of another part of the same layer."""
        return sorted(
            f"{item.importer} imports {item.module}"
            for item in self.imports
            if item.module.partition(".")[0] == "kcap" and not _may_import(item.importer, item.module)
        )

    def circles(self) -> list[list[str]]:
        """Modules that import each other, directly or not, while they are being imported."""
        targets = self._targets(lambda item: item.at_top and not item.only_types)
        return [sorted(group) for group in _strongly_connected(targets) if len(group) > 1]

    def format_imports(self) -> list[str]:
        """What formats import that a reader of files should not need, directly or through other modules."""
        formats = [name for name in self.sources if _is_format(name)]
        return self._foreign(formats, lambda top: top in NOT_FOR_FORMATS)

    def engine_imports(self) -> list[str]:
        """What the code inside an engine's process imports, at any time, that the engine may not have."""
        inside = [name for name in self.sources if name.startswith(tuple(f"kcap.capture.{n}" for n in INSIDE_ENGINES))]
        return self._foreign(inside, lambda top: top not in sys.stdlib_module_names and top not in FOR_ENGINES)

    def _foreign(self, starts: list[str], is_foreign: Callable[[str], bool]) -> list[str]:
        """Imports from outside the package that are `is_foreign`, of these modules and of all that they import."""
        targets = self._targets(lambda item: not item.only_types)
        reached = set(starts).union(*(_reachable(name, targets) for name in starts))
        return [
            f"{item.importer} imports {item.module}"
            for item in self.imports
            if item.importer in reached and not item.only_types and is_foreign(item.module.partition(".")[0])
            if not item.module.startswith("kcap")
        ]

    def _targets(self, counts: Callable[[Import], bool]) -> dict[str, set[str]]:
        """Each module's imports in the package, of those that count."""
        targets: dict[str, set[str]] = {name: set() for name in self.sources}
        for item in self.imports:
            if counts(item) and item.module in targets and item.module != item.importer:
                targets[item.importer].add(item.module)
        return targets

    def crowded(self) -> dict[str, int]:
        """Folders with more entries than a reader takes in, and how many they have."""
        entries: dict[str, set[str]] = {}
        for path in _files(self.root):
            for parent, child in zip(path.parents, (path, *path.parents), strict=False):
                if parent != Path(".") and child.name != "__init__.py" and child.suffix != ".md":
                    entries.setdefault(str(parent), set()).add(child.name)
        return {folder: len(names) for folder, names in entries.items() if len(names) > MOST_ENTRIES}


def _files(root: Path) -> Iterator[Path]:
    """The files of the package, by their path in the repository; the links in kcap/ are not followed."""
    for top in ("kcap", "schemas", "capture", "replay", "bench"):
        for directory, folders, names in os.walk(root / top):
            folders[:] = [folder for folder in folders if folder != "__pycache__"]
            yield from (Path(directory, name).relative_to(root) for name in names)


def _python_files(root: Path) -> Iterator[Path]:
    return (path for path in _files(root) if path.suffix == ".py")


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "kcap" else ("kcap", *parts)).removesuffix(".__init__")


def _import_nodes(
    statements: list[ast.stmt], at_top: bool = True, only_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_top, only_types
            continue
        inside = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = only_types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for field in ("body", "handlers", "cases"):
            yield from _import_nodes(getattr(node, field, []), inside, typing)
        for field in ("orelse", "finalbody"):
            yield from _import_nodes(getattr(node, field, []), inside, only_types)


def _layer(module: str) -> tuple[int, str]:
    """The layer of a module, and the part of that layer."""
    parts = [(prefix, level) for level, prefixes in enumerate(LAYERS) for prefix in prefixes]
    return max((len(prefix), level, prefix) for prefix, level in parts if f"{module}.".startswith(f"{prefix}."))[1:]


def _may_import(importer: str, module: str) -> bool:
    importer_level, importer_part = _layer(importer)
    level, part = _layer(module)
    return level < importer_level or part == importer_part or level == importer_level == 0


def _strongly_connected(targets: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes that all reach each other."""
    reached = {name: _reachable(name, targets) for name in targets}
    groups = {
        frozenset(other for other in reached[name] | {name} if name in reached[other] or other == name)
        for name in targets
    }
    return [set(group) for group in groups]


def _reachable(start: str, targets: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in targets[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def _is_format(module: str) -> bool:
    return module.startswith("kcap.schemas") and not module.startswith("kcap.schemas.derive")


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(ROOT)


def test_layers_point_down(package: Package) -> None:
    assert package.upward() == []


def test_no_files_import_each_other_in_a_circle(package: Package) -> None:
    assert package.circles() == []


def test_formats_need_neither_torch_nor_a_terminal(package: Package) -> None:
    assert package.format_imports() == []


def test_what_runs_in_an_engine_imports_only_what_the_engine_has(package: Package) -> None:
    """At import and later; `capture/test_imports.py` holds the same against `sys.modules`."""
    assert package.engine_imports() == []


def test_a_folder_has_few_entries(package: Package) -> None:
    assert {folder: number for folder, number in package.crowded().items() if folder not in CROWDED} == {}


@pytest.mark.parametrize("folder", ["bench", "capture", "replay", "schemas"])
def test_what_kcap_has_of_a_folder_is_a_link_to_it(folder: str) -> None:
    assert os.readlink(ROOT / "kcap" / folder) == f"../{folder}"


def broken(root: Path, files: dict[str, str]) -> Package:
    """A package of these files, by their paths in the repository."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Package(root)


UPWARD = {
    "schemas/value.py": "from kcap.capture.session import Session",
    "capture/session.py": "if True:\n    from kcap.replay import plan",
    "replay/plan.py": "def run():\n    try:\n        pass\n    finally:\n        import kcap.bench.judge",
    "bench/judge.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kcap.commands import bench",
    "kcap/system/output.py": "import kcap.cli",
    "kcap/show/table.py": "import kcap.schemas.value, kcap.errors",
}


def test_an_import_of_a_higher_layer_is_found_wherever_it_stands(tmp_path: Path) -> None:
    assert broken(tmp_path, UPWARD).upward() == [
        "kcap.bench.judge imports kcap.commands",
        "kcap.capture.session imports kcap.replay.plan",
        "kcap.replay.plan imports kcap.bench.judge",
        "kcap.schemas.value imports kcap.capture.session",
        "kcap.system.output imports kcap.cli",
    ]


def test_a_circle_is_found_through_a_third_file(tmp_path: Path) -> None:
    circle = {f"schemas/{a}.py": f"from kcap.schemas.{b} import f" for a, b in ("ab", "bc", "ca")}
    late = "if TYPE_CHECKING:\n    import kcap.schemas.a\ndef f():\n    import kcap.schemas.d"
    package = broken(tmp_path, {**circle, "schemas/d.py": "import kcap.schemas.e", "schemas/e.py": late})
    assert package.circles() == [["kcap.schemas.a", "kcap.schemas.b", "kcap.schemas.c"]]


def test_a_format_that_needs_torch_through_another_module_is_found(tmp_path: Path) -> None:
    files = {
        "schemas/recording/call.py": "from kcap.system.device import name\nimport numpy",
        "kcap/system/device.py": "def name():\n    from torch.cuda import get_device_name",
        "schemas/derive/derive.py": "import torch",
    }
    assert broken(tmp_path, files).format_imports() == ["kcap.system.device imports torch.cuda"]


def test_what_an_engine_may_lack_is_found_in_what_a_tap_imports(tmp_path: Path) -> None:
    files = {
        "capture/taps/triton.py": "import json, torch\nfrom kcap.capture.shards import lines",
        "capture/shards/lines.py": "import pydantic",
        "capture/shards/__init__.py": "",
        "capture/fold/fold.py": "import numpy",
    }
    assert broken(tmp_path, files).engine_imports() == ["kcap.capture.shards.lines imports pydantic"]


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    names = ["__init__", *"abcdefghijklm"]
    files = {f"replay/plan/{name}.py": "" for name in names} | {f"replay/{name}.py": "" for name in "abcdefghijk"}
    assert broken(tmp_path, files).crowded() == {"replay/plan": 13}
