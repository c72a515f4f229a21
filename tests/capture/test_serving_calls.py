"""What `kcap record --client` refuses before it starts anything, and when it takes a server to be ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcap.capture.controller import serving
from kcap.capture.engines import Server

Kcap = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--client", "no-such-client", "--", "vllm", "serve", "m"), "there is no command no-such-client"),
        (("--client", "", "--", "vllm", "serve", "m"), "there is no command"),
        (("--client", "true 'x", "--", "vllm", "serve", "m"), "No closing quotation"),
        (("--client", "true", "--", "my-server"), "pass --ready URL"),
        (("--client", "true", "--", "vllm", "serve", "m", "--config", "c.yaml"), "pass --ready URL"),
        (("--client", "true", "--ready", "localhost:80", "--", "my-server"), "give an http:// or https:// URL"),
        *[
            (("--client", "true", "--ready", url, "--", "my-server"), "URL with a host")
            for url in (
                "http://[::1",
                "http://",
                "http://localhost:80a/",
                "http://a b/",
                "http://a..b/",
                "http://a/\u00e9",
            )
        ],
        (("--ready", "http://127.0.0.1:1/", "--", "my-server"), "--ready is of a --client"),
        (("--ready-timeout", "0", "--", "my-server"), "--ready-timeout is of a --client"),
        (("--client", "true", "--model", "kcap/tiny-llama"), "--client needs a server"),
    ],
)
def test_a_wrong_call_starts_nothing(words: tuple[str, ...], text: str, kcap: Kcap, tmp_path: Path) -> None:
    ran = kcap("record", "-o", tmp_path / "out", *words)
    assert ran.code == 2
    assert text in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("vllm serve m", "http://127.0.0.1:8000/health"),
        ("/opt/venv/bin/vllm serve m --port 81 --host 0.0.0.0", "http://127.0.0.1:81/health"),
        ("python -m vllm.entrypoints.openai.api_server --port=82 --host=::", "http://[::1]:82/health"),
        ("env A=b vllm serve m --host gpu7 --port 83 --port 84", "http://gpu7:84/health"),
        ("python -m sglang.launch_server --model-path m", "http://127.0.0.1:30000/health"),
        ("vllm serve m --host ::1", "http://[::1]:8000/health"),
        ("vllm serve m --port auto", None),
        ("vllm serve m --uds /tmp/s", None),
        ("vllm bench throughput", None),
    ],
)
def test_the_url_of_a_usual_command_is_plain(command: str, url: str | None) -> None:
    assert serving.ready_url(command.split()) == url


def test_the_usual_commands_are_the_adapters_own() -> None:
    server = Server(("toy", "serve"), 9, "/ready")
    assert serving.ready_url(["toy", "serve"], [server]) == "http://127.0.0.1:9/ready"
    assert serving.ready_url(["toy", "serve"]) is None
