"""The folders that a task can be: one file each, its TaskForm registered under the file's name with dashes.

`kcap` is the form that `kcap judge` reads. Each of the others is a harness's own, and holds it, or a dataset. A form's
module is imported when it is asked for: it needs torch.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kcap.system.registry import Registry, plugin_names

if TYPE_CHECKING:
    from kcap.bench.tasks.draft import TaskDraft

MARK = "kcap.task"  # a file that tells a folder of `kcap task` where its form has no task.json
TASK_FORMS: Registry[str, TaskForm] = Registry("task form")


class TaskForm(ABC):
    """Writes a task as one harness takes it. `needs`: what the command that follows needs beside kcap."""

    needs: str = ""

    @abstractmethod
    def write(self, draft: TaskDraft, folder: Path) -> None:
        """Write into `folder`, which is empty."""

    @abstractmethod
    def following(self, output: Path) -> str:
        """The command that uses what was written, as a shell takes it."""


def task_form(name: str) -> Callable[[type[TaskForm]], type[TaskForm]]:
    """Register a TaskForm as `name`."""

    def register(kind: type[TaskForm]) -> type[TaskForm]:
        TASK_FORMS.add(name, kind())
        return kind

    return register


def find_form(name: str) -> TaskForm:
    """The TaskForm `name`, one of `form_names()`."""
    importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return TASK_FORMS[name]


def form_names() -> list[str]:
    """The name of every form: that of its file, with dashes."""
    return sorted(name.replace("_", "-") for name in plugin_names(__name__))
