"""Fetch the libraries that `kcap report` puts into its page, by npm, and write them with their licences.

    python scripts/vendor_report_libraries.py            # writes kcap/report/vendor/
    python scripts/vendor_report_libraries.py --check    # exit code 1 where what is there differs

Versions and the SHA-512 of each package are pinned here. Nothing is built: each file is the package's own, without the
line that names its source map.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "kcap" / "report" / "vendor"
SOURCE_MAP = re.compile(r"\n?//# sourceMappingURL=\S+\s*$")


@dataclass(frozen=True)
class Package:
    """`files`: what of the package is written, and under which name."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "10.29.1",
        "sha512-gQCLc/vWroE8lIpleXtdJhTFDogTdZG9AjMUpVkDf2iTCNwYNWA+u16dL41TqUDJO4gm2IgrcMv3uTpjd4Pwmg==",
        {"dist/preact.umd.js": "preact.js", "hooks/dist/hooks.umd.js": "hooks.js"},
    ),
    Package(
        "htm",
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.umd.js": "htm.js"},
    ),
)


def fetch(package: Package, folder: Path) -> dict[str, bytes]:
    """The package's files by their path in it; SystemExit where it is not the one that is pinned."""
    named = f"{package.name}@{package.version}"
    subprocess.run(["npm", "pack", "--silent", named], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        sys.exit(f"{named}: its SHA-512 is {digest}, not the pinned one")
    with tarfile.open(archive) as packed:
        wanted = [*package.files, "LICENSE"]
        return {path: packed.extractfile(f"package/{path}").read() for path in wanted}  # type: ignore[union-attr]


def vendored() -> dict[str, str]:
    """Everything that is to lie in the folder, by name."""
    files, licences = {}, []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            contents = fetch(package, Path(folder))
        for path, name in package.files.items():
            files[name] = SOURCE_MAP.sub("", contents[path].decode()) + "\n"
        licences.append(f"{package.name} {package.version}\n\n{contents['LICENSE'].decode().strip()}\n")
    return {**files, "licences.txt": "\n\n".join(licences)}


def main() -> None:
    files = vendored()
    if "--check" in sys.argv[1:]:
        changed = [name for name, text in files.items() if (VENDOR / name).read_text() != text]
        sys.exit(f"not as fetched: {', '.join(changed)}" if changed else 0)
    VENDOR.mkdir(exist_ok=True)
    for name, text in files.items():
        (VENDOR / name).write_text(text)


if __name__ == "__main__":
    main()
