"""The seal on a Recording's kernel sources: this user recorded them on this machine, so replay may run them.

An HMAC over the files' names, which are the SHA-256 of their contents, with a secret key in the user's own data folder.
An exported dataset carries one, too, over the hashes of its Definitions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kcap.errors import KcapError

KEY_BYTES = 32
PURPOSE = b"kcap kernels 1\n"


def key_path() -> Path:
    """`~/.local/share/kcap/key`, or where XDG_DATA_HOME says; OSError where there is neither."""
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    folder = data if data.is_absolute() else Path(os.path.expanduser("~"), ".local", "share")
    if not folder.is_absolute():
        raise OSError("this user has no home: set XDG_DATA_HOME")
    return folder / "kcap" / "key"


def seal(names: Iterable[str]) -> str:
    """The seal of the kernel files called `names`; makes the user's key on first use, OSError where that cannot be."""
    return _seal(read_key() or make_key(), names)


def holds(sealed: str | None, names: Iterable[str]) -> bool:
    """Whether `sealed` is this user's seal of exactly these files."""
    key = read_key()
    return bool(key and sealed and hmac.compare_digest(sealed.encode(), _seal(key, names).encode()))


def _seal(key: bytes, names: Iterable[str]) -> str:
    return hmac.new(key, PURPOSE + "\n".join(sorted(set(names))).encode(), hashlib.sha256).hexdigest()


def read_key() -> bytes | None:
    """The key; None where there is none, or where another user could have written it."""
    try:
        with key_path().open("rb") as file:
            state = os.fstat(file.fileno())
            key = file.read()
    except OSError:
        return None
    private = state.st_uid == os.getuid() and not state.st_mode & 0o077
    return key if private and len(key) == KEY_BYTES else None


def make_key() -> bytes:
    """Make the key; where two processes do so at once, both get the one that was linked first."""
    path = key_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()
    key = read_key()
    if key is None:
        raise KcapError(f"{path}: not a private key of {KEY_BYTES} bytes: remove it, kcap makes another")
    return key
