"""The judge: whether a Solution computes what its Definition's reference does, and how fast; in a process of its own,
in which no code from elsewhere runs.
"""

from __future__ import annotations
