"""An agent with tool calls, against a server of the tiny model: a client, the tokenizer, what must be recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kcap.schemas.recording.recording import Recording, Request
from kcap.schemas.recording.turns import Turn, read_turns, tools_of

SESSIONS, MAX_LEN = 10, 2048
END = "<end>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and one that ends an answer."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {character: number for number, character in enumerate([*alphabet, END])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """The tiny model with a vocabulary of bytes."""
    folder.mkdir()
    changed = {"vocab_size": 257, "max_position_embeddings": MAX_LEN, "eos_token_id": 256, "bos_token_id": 256}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    write_tokenizer(folder)
    return folder


CLIENT = """
import http.client, json, os, socket, sys, threading

port, output, SESSIONS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
SYSTEM = "You are an agent that looks at the weather before it answers. " * 6
cities = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": cities}}]
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("API_KEY", "")}
answers = []
begun = threading.Event()  # the first prompt of session 0, and no other, finds nothing in the cache


def post(body, path="/v1/chat/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), HEADERS)
    return connection.getresponse()


def ask(session, turn, messages, **more):
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 24, "temperature": 0, **more}
    content = post(body).read()
    if more.get("stream"):
        events = [json.loads(line[6:]) for line in content.split(b"\\n") if line.startswith(b"data: {")]
        text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
        answer, message = events[-1], {"role": "assistant", "content": text}
        answer["id"] = events[0]["id"]
    else:
        answer = json.loads(content)
        message = answer["choices"][0]["message"]
    answers.append({"session": session, "turn": turn, "id": answer["id"], "usage": answer["usage"]})
    return {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}


def converse(session):
    if session:
        begun.wait(120)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Weather of day {session}?" * 3}]
    called = ask(session, 0, messages, tool_choice="required", max_tokens=250, temperature=1, seed=session)
    begun.set()
    call = called["tool_calls"][0]
    messages += [called, {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees; " * 9}]
    messages.append(ask(session, 1, messages, tool_choice="none", ignore_eos=True))
    messages.append({"role": "user", "content": "And on the day after that? Say it in a few words, and why." * 2})
    ask(session, 2, messages, tool_choice="none", ignore_eos=True, stream=True, stream_options={"include_usage": True})


def respond(turn, items, stream):
    body = {"model": "tiny", "input": items, "max_output_tokens": 24, "temperature": 0, "store": False}
    content = post({**body, "stream": stream}, "/v1/responses").read()
    events = [json.loads(line[6:]) for line in content.split(b"\\n") if line.startswith(b"data: {")]
    answer = events[-1]["response"] if stream else json.loads(content)
    usage = {"prompt_tokens": answer["usage"]["input_tokens"], "completion_tokens": answer["usage"]["output_tokens"]}
    usage["prompt_tokens_details"] = answer["usage"]["input_tokens_details"]
    answers.append({"session": "responses", "turn": turn, "id": answer["id"], "usage": usage})
    return answer["output"]


threads = [threading.Thread(target=converse, args=(number,)) for number in range(SESSIONS)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
refused = post({"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 100000})
assert refused.status == 400, refused.status
refused.read()
gone = {"model": "tiny", "messages": [{"role": "user", "content": "Tell all."}], "max_tokens": 1900, "ignore_eos": True}
for _ in range(3):  # on a busy machine a server may notice only when all is sent
    stream = post({**gone, "stream": True})
    stream.read1(60)
    stream.close()
assert len(answers) == 3 * SESSIONS, answers
items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And the wind?" * 5}]}]
items += respond(0, items, False) + [{"type": "message", "role": "user", "content": "And the rain?"}]
respond(1, items, True)
ask("last", 0, [{"role": "user", "content": "Still there?"}], ignore_eos=True)
json.dump(answers, open(output, "w"))
"""


def of_answer(recording: Recording, answer: dict[str, Any]) -> tuple[Turn, Request]:
    (turn,) = [turn for turn in read_turns(recording.path) if turn.id == answer["id"]]
    (place,) = turn.requests
    return turn, recording.requests[place]


def assert_tokens_are_those_of_the_engine(recording: Recording, answers: list[dict[str, Any]]) -> None:
    """Each turn and its request have what the engine told its client."""
    for answer in answers:
        turn, request = of_answer(recording, answer)
        usage = answer["usage"]
        told = (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
        assert (request.prompt, request.cached, request.generated) == told
        assert turn.usage is not None
        assert (turn.usage.prompt, turn.usage.cached or 0, turn.usage.generated) == told
        assert request.computed == request.prompt - request.cached
    assert sum(request.cached for request in recording.requests) > 0


def assert_requests_sum_to_steps(recording: Recording) -> None:
    assert recording.metadata.complete
    computed = sum(batch["tokens"] * batch["steps"] for batch in recording.metadata.batches)
    assert sum(request.tokens for request in recording.requests) == computed
    sequences = sum(batch["sequences"] * batch["steps"] for batch in recording.metadata.batches)
    assert sum(request.prefills + request.decodes for request in recording.requests) == sequences


def assert_sessions_are_those_of_the_client(recording: Recording, answers: list[dict[str, Any]]) -> None:
    sessions: dict[Any, set[int]] = {}
    for answer in answers:
        turn, _ = of_answer(recording, answer)
        sessions.setdefault(answer["session"], set()).add(turn.session)
        assert turn.turn == answer["turn"]
        assert set(tools_of(turn)) == (
            {"get_weather"} if turn.turn == 0 and answer["session"] in range(SESSIONS) else set()
        )
    assert all(len(numbers) == 1 for numbers in sessions.values())
    assert len(set.union(*sessions.values())) == len(sessions)


def assert_blocks_are_shared_with_the_turn_before(recording: Recording) -> None:
    size = recording.metadata.block_size
    assert size is not None
    turns = read_turns(recording.path)
    for turn in turns:
        if turn.parent is not None and turn.requests:
            request = recording.requests[turn.requests[0]]
            parent = recording.requests[turns[turn.parent].requests[0]]
            whole = parent.prompt // size
            assert request.blocks[:whole] == parent.blocks[:whole]
            assert len(request.blocks) == -(-request.prompt // size)


def assert_refused_and_abandoned_requests_are_turns(recording: Recording, answers: list[dict[str, Any]]) -> None:
    known = {answer["id"] for answer in answers}
    others = [turn for turn in read_turns(recording.path) if turn.id not in known]
    refused, *gone = sorted(others, key=lambda turn: turn.status != 400)
    assert (refused.status, refused.requests, refused.error) == (400, [], "BadRequestError")
    assert len(gone) == 3 and all(len(turn.requests) == 1 for turn in gone)
    generated = [recording.requests[turn.requests[0]].generated for turn in gone if turn.aborted]
    assert generated and all(0 < tokens < 1900 for tokens in generated)
