"""Mooncake's traces, which vLLM's `timed_trace` and AIPerf's `mooncake_trace` read, too: a request a line, in JSON.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

Source: Mooncake (FAST'25 release) and vLLM's `benchmarks/datasets`. `timestamp` is in milliseconds; each id stands for
all tokens up to its block's end, in blocks of 512 tokens. Here they have the Recording's size (vLLM's own), which is
told by `block_size` in each line. Sessions are told by `session_id`, as AIPerf has it, where there are any.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Form,
    form,
    json_lines,
    read_json_lines,
    unheld,
    whole,
)
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger

BLOCK = 512  # tokens, where a file does not tell
KEYS = {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "session_id"}


@form("mooncake")
class Mooncake(Form):
    suffix = ".jsonl"

    def reads(self, document: Any) -> bool:
        return isinstance(document, dict) and "input_length" in document and "messages" not in document

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        turns, blocks, size = list[Turn](), dict[int, list[int]](), BLOCK
        last: dict[str, Turn] = {}  # of each session
        for number, line in enumerate(read_json_lines(content, place)):
            where = f"{place}: line {number + 1}"
            if not isinstance(line, dict):
                raise FormatError(where, "must be a JSON object")
            losses.update(f"{key}: no Turn has it" for key in line.keys() - KEYS)
            size = whole(line.get("block_size", size), f"{where}: block_size") or BLOCK
            if ids := line.get("hash_ids"):
                if not isinstance(ids, list):
                    raise FormatError(where, "hash_ids: must be a list of whole numbers")
                blocks[number] = [whole(value, f"{where}: hash_ids") for value in ids]
            turn = _turn(number, line, where, last.get(str(line.get("session_id", number))), len(last))
            last[str(line.get("session_id", number))] = turn
            turns.append(turn)
        return AgentTurns(turns, blocks, size if blocks else 0)

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        known = [turn for turn in trace.turns if _tokens_known(turn)]
        if lost := len(trace.turns) - len(known):
            losses.lose(TURN, "how many tokens it had is not known", lost)
        start = min((turn.sent for turn in known), default=0.0)
        return {"trace": json_lines(_line(trace, turn, start, losses) for turn in known)}


def _turn(number: int, line: dict[str, Any], where: str, parent: Turn | None, session: int) -> Turn:
    prompt = whole(line.get("input_length"), f"{where}: input_length")
    generated = whole(line.get("output_length"), f"{where}: output_length")
    timestamp = line.get("timestamp", 0)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise FormatError(where, "timestamp: must be a number of milliseconds, from 0")
    links: dict[str, Any] = (
        {"parent": parent.number, "turn": parent.turn + 1, "session": parent.session} if parent else {}
    )
    return Turn(
        number=number, **{"session": session, **links}, api="completion", status=200, sent=timestamp / 1e3,
        messages=[TurnMessage(role="prompt", chars=prompt)], usage=Usage(prompt=prompt, generated=generated),
    )  # fmt: skip


def _tokens_known(turn: Turn) -> bool:
    return turn.usage is not None and turn.usage.prompt is not None and turn.usage.generated is not None


def _line(trace: AgentTurns, turn: Turn, start: float, losses: LossLedger) -> dict[str, Any]:
    usage = turn.usage or Usage()
    blocks = trace.blocks.get(turn.number)
    if turn.messages != [TurnMessage(role="prompt", chars=usage.prompt or 0)] or turn.answers or turn.shared:
        losses.reduce(TURN, "messages, tools and answers", 1)
    if unheld(turn, "api", "sent", "usage") or usage.cached is not None:
        losses.reduce(TURN, "parameters, the end of it, and what it found in the prefix cache", 1)
    line = {
        "timestamp": round((turn.sent - start) * 1e3, 3),
        "input_length": usage.prompt,
        "output_length": usage.generated,
        "session_id": str(turn.session),
    }
    return line if blocks is None else line | {"hash_ids": blocks, "block_size": trace.block_size}
