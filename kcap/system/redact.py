"""Keeps secrets out of a Recording: API keys, tokens and passwords on a command line or among engine arguments."""

from __future__ import annotations

import json
import re
from typing import Any

HIDDEN = "REDACTED"
NAMES = r"(?:api[-_]?key|key|token|password|passwd|secret|credentials?)"
# The last word of an option says what it holds: --api-key and --hf-token do, --max-num-batched-tokens does not.
SECRET_NAME = re.compile(rf"(?:^|[-_.]){NAMES}$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,}|Bearer\s+\S+)|(?<=://)[^\s/@]+:[^\s/@]+(?=@)"
)
# In a text that is a command itself, or nearly JSON: `--api-key VALUE`, `"token": "VALUE"`, `HF_TOKEN=VALUE`.
SECRET_PAIR = re.compile(
    rf"""((?:--?(?:[\w.-]*[-_.])?{NAMES}\s+|(?:\b|["'])(?:[\w.-]*[-_.])?{NAMES}["']?\s*[:=]\s*))"""
    r"""('[^']*'|"[^"]*"|[^\s,;}}\]]+)""",
    re.IGNORECASE,
)


def redact_command(command: list[str]) -> list[str]:
    """The command with every secret's value replaced; an option's values end at the next option."""
    out: list[str] = []
    hiding = False
    for word in command:
        name, equals, _ = word.partition("=")
        if word.startswith("-") or (equals and name.isidentifier()):
            secret = bool(SECRET_NAME.search(name.lstrip("-")))
            hiding = secret and not equals
            out.append(f"{name}={HIDDEN}" if secret and equals else redact_text(word))
        else:
            out.append(HIDDEN if hiding else redact_text(word))
    return out


def redact_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with every secret's value replaced, nested ones too."""
    return {name: HIDDEN if SECRET_NAME.search(name) else _redact(value) for name, value in arguments.items()}


def _redact(value: Any) -> Any:
    if isinstance(value, dict):
        return redact_arguments(value)
    if isinstance(value, list | tuple):
        return [_redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """A text, perhaps a JSON document, with every secret in it replaced."""
    try:
        value = json.loads(text)
    except ValueError:
        return SECRET_VALUE.sub(HIDDEN, SECRET_PAIR.sub(rf"\1{HIDDEN}", text))
    if isinstance(value, dict | list) and (clean := _redact(value)) != value:
        return json.dumps(clean)
    return SECRET_VALUE.sub(HIDDEN, text)
