"""The sdist is laid out as the repository: the links in kcap/ stay links. All else is in pyproject.toml."""

from __future__ import annotations

import os

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = ("bench", "capture", "replay", "schemas")  # kcap/NAME is a link to ../NAME


class SdistWithLinks(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        through_links = tuple(os.path.join("kcap", name, "") for name in LINKS)
        super().make_release_tree(base_dir, [path for path in files if not path.startswith(through_links)])
        for name in LINKS:
            os.symlink(os.path.join("..", name), os.path.join(base_dir, "kcap", name))


setup(cmdclass={"sdist": SdistWithLinks})
