"""OpenTelemetry's spans as OTLP has them in JSON: `resourceSpans`, `scopeSpans`, `spans`, attributes as a list.

Source: opentelemetry-proto 1.5, `trace.proto` and the JSON mapping of OTLP 1.5 (64-bit integers are strings).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import orjson

from kcap.errors import FormatError

SECOND = 10**9  # nanoseconds


@dataclass(frozen=True)
class Span:
    """`start`, `end`: seconds since the epoch; `attributes`: texts, numbers, booleans and lists of them."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)


def reads_spans(document: Any, attribute: str) -> bool:
    """Whether `document` has spans of which one has an attribute that begins so."""
    if not isinstance(document, dict) or "resourceSpans" not in document:
        return False
    try:
        return any(name.startswith(attribute) for span in read_spans(document, "") for name in span.attributes)
    except FormatError:
        return False


def read_spans(document: Any, place: str) -> Iterator[Span]:
    """The spans in an export, by their start; FormatError where it is none."""
    try:
        spans = [
            _span(span)
            for resource in document["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(place, f"no spans of OTLP ({type(error).__name__}: {error})") from None
    yield from sorted(spans, key=lambda span: span.start)


def _span(span: Any) -> Span:
    times = [float(Fraction(int(span.get(name, 0)), SECOND)) for name in ("startTimeUnixNano", "endTimeUnixNano")]
    attributes = {str(entry["key"]): _value(entry["value"]) for entry in span.get("attributes", [])}
    return Span(str(span.get("name", "")), max(0.0, times[0]), max(0.0, times[1]), attributes)


def _value(value: Mapping[str, Any]) -> Any:
    (kind, content), *_ = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value(item) for item in content.get("values", [])]
    return content


def write_spans(spans: Iterable[tuple[int, int, Span]]) -> bytes:
    """The export of spans, each with its session and its number."""
    encoded = [
        {
            "traceId": hashlib.sha256(b"session %d" % session).hexdigest()[:32],
            "spanId": f"{number + 1:016x}",
            "name": span.name,
            "kind": 3,  # client
            "startTimeUnixNano": str(round(Fraction(span.start) * SECOND)),
            "endTimeUnixNano": str(round(Fraction(span.end) * SECOND)),
            "attributes": [{"key": name, "value": _encoded(value)} for name, value in span.attributes.items()],
        }
        for session, number, span in spans
    ]
    scope = {"scope": {"name": "kcap"}, "spans": encoded}
    document = {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def _encoded(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_encoded(item) for item in value]}}
    return {"stringValue": str(value)}


def json_attribute(attributes: Mapping[str, Any], name: str, place: str) -> Any:
    """The document in a text attribute; None where there is none. FormatError where it is no JSON."""
    text = attributes.get(name)
    if text is None or not isinstance(text, str):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise FormatError(place, f"{name}: {error.msg}") from None
