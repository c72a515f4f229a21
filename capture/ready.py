"""Whether a server serves: the URL that says so, and what it answers."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from kcap.capture.engines import adapters
from kcap.capture.engines.engine import Server

ANSWER = 5.0  # seconds that an answer may take
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def url_of(command: list[str], servers: Iterable[Server] | None = None) -> str | None:
    """The URL that answers once `command` serves; None where that is not plain. `servers`: of all adapters if None."""
    known = (server for engine in adapters() for server in engine.FRAMEWORK.servers) if servers is None else servers
    words = {Path(word).name for word in command} | set(command)
    server = next((server for server in known if words.issuperset(server.words)), None)
    if server is None or any(word.partition("=")[0] in server.elsewhere for word in command):
        return None
    host = _option(command, "--host") or "127.0.0.1"
    port = _option(command, "--port") or str(server.port)
    host = EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}{server.ready}" if port.isdigit() else None


def _option(command: list[str], name: str) -> str | None:
    """The last value of an option, written `name value` or `name=value`."""
    found = None
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def is_whole(url: str) -> bool:
    """Whether it can be asked for at all."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        named = bool(host) and parts.port != 0
    except ValueError:  # a port that is no number, half of an address
        return False
    return named and parts.scheme in ("http", "https") and url.isascii() and url.isprintable() and " " not in url


def why_not(url: str) -> str:
    """Why the server at `url` does not serve; empty if it does: a success was answered, by no proxy."""
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=ANSWER):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"no answer: {getattr(error.reason, 'strerror', None) or error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error or type(error).__name__}"
