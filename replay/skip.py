"""Why a Call is not replayed: a plain sentence that ends up in its measurement."""

from __future__ import annotations


class Skip(Exception):
    """This Call cannot be replayed here, through no fault of its own; the message is the reason."""
