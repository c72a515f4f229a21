"""One HTML file: the page's own code and styles, the libraries, and the data, gzip'd.

Nothing of the data is text of the page: it is base64, which no browser takes for markup, and the page's code makes text
nodes of it. Scripts and styles run by their hashes alone, and nothing may be fetched (the policy in the head).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from pathlib import Path

import orjson

from kcap.report.calls import CallDetails
from kcap.report.document import Report

ROOT = Path(__file__).parent
LIBRARIES = ("preact.js", "hooks.js", "htm.js")
SCRIPTS = (
    *("model.js", "controls.js"),
    *("phases.js", "kernels.js", "call.js", "figures.js", "steps.js", "agents.js", "others.js"),
    "main.js",
)
LICENCES = "licences.txt"
LEVEL = 9  # of gzip, whose time stamp stays 0: the same data gives the same file
POLICY = "default-src 'none'; script-src {scripts}; style-src {styles}; base-uri 'none'; form-action 'none'"


def page(report: Report, details: CallDetails) -> bytes:
    """The file's bytes; the same for the same arguments."""
    libraries = "\n".join((ROOT / "vendor" / name).read_text(encoding="utf-8") for name in LIBRARIES)
    code = "\n".join((ROOT / "web" / name).read_text(encoding="utf-8") for name in SCRIPTS)
    styles = (ROOT / "web" / "page.css").read_text(encoding="utf-8")
    scripts = {"libraries": _closed(libraries), "code": f'"use strict";\n{code}'}
    policy = POLICY.format(scripts=" ".join(map(_hash, scripts.values())), styles=_hash(styles))
    parts = {
        "policy": html.escape(policy, quote=True),
        "styles": styles,
        "licences": html.escape((ROOT / "vendor" / LICENCES).read_text(encoding="utf-8")),
        "report": _packed(report),
        "details": _packed(details),
        **scripts,
    }
    out = (ROOT / "web" / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        out = out.replace(f"@@{name}@@", text)
    return out.encode()


def _closed(script: str) -> str:
    """A classic script whose libraries find no module system, and which holds nothing that ends its element."""
    if "</script" in script or "<!--" in script:
        raise ValueError("a library holds what would end its script element")
    return script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(data: Report | CallDetails) -> str:
    content = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)
    return base64.b64encode(gzip.compress(content, LEVEL, mtime=0)).decode()
