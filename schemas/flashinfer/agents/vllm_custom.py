"""vLLM's benchmark dataset `custom`: a prompt a line, `{"prompt": "…", "output_tokens": 64}`.

Source: vLLM 0.32, `benchmarks/datasets`. A conversation is no prompt: it is written as the text of its messages, one
after the other, as vLLM's own template would do in its way, and read as one message of a user.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kcap.errors import FormatError
from kcap.schemas.flashinfer.agents import (
    TURN,
    AgentTurns,
    Form,
    describe,
    form,
    json_lines,
    read_json_lines,
    turns_with_texts,
    unheld,
    whole,
)
from kcap.schemas.recording.turns import Turn, TurnMessage, Usage
from kcap.schemas.results.export_loss import LossLedger


@form("vllm-custom")
class VLLMCustom(Form):
    suffix = ".jsonl"

    def reads(self, document: Any) -> bool:
        return isinstance(document, dict) and isinstance(document.get("prompt"), str)

    def read(self, content: bytes, place: str, losses: Counter[str]) -> AgentTurns:
        turns = []
        for number, line in enumerate(read_json_lines(content, place)):
            where = f"{place}:{number + 1}"
            if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
                raise FormatError(where, "prompt: must be a text")
            tokens = line.get("output_tokens")
            usage = None if tokens is None else Usage(generated=whole(tokens, f"{where}: output_tokens"))
            message = TurnMessage(**describe({"role": "user", "content": line["prompt"]}))
            turns.append(Turn(number=number, session=number, status=200, messages=[message], usage=usage))
        return AgentTurns(turns)

    def write(self, trace: AgentTurns, losses: LossLedger) -> dict[str, bytes]:
        lines = []
        for turn, messages in turns_with_texts(trace, trace.turns, losses):
            texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
            if turn.parent is not None or [message["role"] for message in messages] != ["user"] or len(texts) != 1:
                losses.reduce(TURN, "which message is whose, and what is no text", 1)
            if turn.answers or unheld(turn, "usage"):
                losses.reduce(TURN, "answers, times, tools and parameters", 1)
            if turn.usage is not None and (turn.usage.prompt is not None or turn.usage.cached is not None):
                losses.reduce(TURN, "the tokens of its prompt", 1)
            generated = turn.usage.generated if turn.usage else None
            lines.append({"prompt": "\n".join(texts)} | ({} if generated is None else {"output_tokens": generated}))
        return {"prompts": json_lines(lines)}
