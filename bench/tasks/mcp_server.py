"""The judge as an MCP server over standard input and output: a thin layer over `serve`, by the package `mcp`.

Tools: `task` (what is to be written), `judge` (a Solution's file or its text, to a Verdict). The judge is started and
asked by one thread of its own, since it ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from kcap.bench.run.options import JudgeOptions
from kcap.bench.tasks.folder import OpenTask
from kcap.bench.tasks.serve import JudgeRequest, judge_request
from kcap.bench.tasks.warm_judge import WarmJudge
from kcap.errors import CallError, KcapError
from kcap.version import __version__

INSTALL_MCP = "--mcp needs the package mcp: pip install 'kcap[mcp]'"


class JudgeThread:
    """A judge in a thread of its own, started with the first judgement."""

    def __init__(self, opened: OpenTask, options: JudgeOptions) -> None:
        self.opened = opened
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kcap-judge")
        self._stack = ExitStack()
        self._judge: WarmJudge | None = None

    async def verdict(self, request: JudgeRequest) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, request)

    def _verdict(self, request: JudgeRequest) -> dict[str, Any]:
        if self._judge is None:
            self._judge = self._stack.enter_context(WarmJudge(self.opened, self._options))
        return judge_request(self._judge, request).model_dump(mode="json", exclude_none=True)

    def close(self) -> None:
        self._thread.submit(self._stack.close).result()
        self._thread.shutdown()


def run_server(opened: OpenTask, options: JudgeOptions) -> None:
    """Serve until standard input ends; CallError where the package is missing."""
    judge = JudgeThread(opened, options)
    server = make_server(judge)
    try:
        server.run()
    finally:
        judge.close()


def make_server(judge: JudgeThread) -> Any:
    """The server with its two tools."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise CallError(INSTALL_MCP) from None
    server = MCPServer("kcap", instructions="Judges kernels written for one task.", version=__version__)

    @server.tool()
    async def task() -> str:
        """What is to be written, why, what has to hold and how it is judged."""
        return (judge.opened.root / "instruction.md").read_text(encoding="utf-8")

    @server.tool()
    async def judge_solution(path: str | None = None, source: str | None = None, quick: bool = False) -> dict[str, Any]:
        """Judge a Solution: the task's own, the file `path`, or the Python text `source`. `quick`: on one Workload."""
        try:
            return await judge.verdict(JudgeRequest(path=path, source=source, quick=quick))
        except KcapError as error:
            raise ToolError(str(error)) from None

    return server
