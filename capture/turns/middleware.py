"""An ASGI middleware that sees a recorded server's requests and answers go by, and passes each on as it is.

vLLM is given it by its own option, `--middleware kcap.capture.turns.middleware.TurnRecorder`; SGLang's application has
it added. Outside of a recorded session it does nothing. A failure of its own costs the turn, and is never the server's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from kcap.capture.session import SESSION_VARIABLE, read_session
from kcap.capture.turns.exchange import APIS, Exchange
from kcap.capture.turns.log import note_failure
from kcap.capture.turns.relay import ExchangeSender

MOST_BYTES = 64 << 20  # of all exchanges under way; of those beyond, only times and sizes are kept
EVENT_STREAM = b"text/event-stream"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class TurnRecorder:
    """`app`: what it is in front of."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self._log: ExchangeSender | None = None
        self._bytes = 0
        path = os.environ.get(SESSION_VARIABLE)
        try:
            session = read_session(path) if path else None
        except (OSError, orjson.JSONDecodeError, TypeError):
            session = None
        if session is not None and session.agent_trace:
            self._session, self._log = session, ExchangeSender(session)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        api = APIS.get(scope.get("path", "").removeprefix(scope.get("root_path", "")))
        if self._log is None or api is None or scope["type"] != "http" or scope.get("method") != "POST":
            return await self.app(scope, receive, send)
        exchange = Exchange(api, time.time())

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._keep(exchange, exchange.request, message.get("body", b""))
            elif message["type"] == "http.disconnect":
                self._end(exchange)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}
                exchange.streamed = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
            elif message["type"] == "http.response.body":
                exchange.first = exchange.first or time.time()
                self._keep(exchange, exchange.answer, message.get("body", b""))
                exchange.complete = not message.get("more_body", False)
            await send(message)
            if exchange.complete:  # an application may stay on for tasks of its own: SGLang's waits for two seconds
                self._end(exchange)

        try:
            await self.app(scope, receiving, sending)
        finally:
            self._end(exchange)

    def _keep(self, exchange: Exchange, kept: bytearray, content: bytes) -> None:
        if exchange.dropped or exchange.ended:
            return
        if self._bytes + len(content) > MOST_BYTES:
            exchange.dropped = True
            return
        kept += content
        self._bytes += len(content)

    def _end(self, exchange: Exchange) -> None:
        """At the answer's end, or where the client went away: only the first time counts."""
        if exchange.ended:
            return
        exchange.ended = time.time()
        self._bytes -= exchange.size
        if self._log is None:
            return
        try:
            self._log.add(exchange)
        except Exception as error:  # nobody takes it, or what nobody thought of: the server goes on
            note_failure(self._session, error)
            self._log = None
