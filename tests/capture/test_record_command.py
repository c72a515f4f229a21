"""`kcap record` called wrongly, or in a place that fails it: one line that names the fix, and no engine is started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ended

import kcap as kcap_package
from kcap.capture.controller import frameworks, offline, run
from kcap.capture.controller.models import find_config
from kcap.capture.fold.metadata import NEVER_OPENED
from kcap.capture.session import Session
from kcap.errors import CallError, KcapError

Kcap = Callable[..., Any]
Python = Callable[..., "subprocess.CompletedProcess[str]"]
TINY = ("--model", "kcap/tiny-llama", "--load-format", "dummy")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that would be started fails the test."""

    def started(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(run, "record_command_line", started)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name == "vllm" or found(name, *a))


def failed(ran: Any, code: int, *texts: str) -> None:
    assert ran.code == code
    lines = ran.err.splitlines()
    assert lines[-1].startswith(("kcap: ", "Error: "))
    assert "Traceback" not in ran.err
    assert ran.out == ""
    for text in texts:
        assert text in ran.err


@pytest.mark.usefixtures("no_engine")
class TestAWrongCall:
    def test_unknown_model_lists_those_that_are_known(self, kcap: Kcap, tmp_path: Path) -> None:
        ran = kcap("record", "--model", "nobody/nothing", "--load-format", "dummy", "-o", tmp_path / "out")
        failed(ran, 2, "unknown model nobody/nothing", "meta-llama/Llama-3.1-8B")

    def test_a_path_that_json_cannot_hold(self, kcap: Kcap, tmp_path: Path) -> None:
        program = (sys.executable, "a\udcff.py")
        failed(kcap("record", "-o", tmp_path / "out", "--", *program), 2, "command: ", "a\\udcff.py", "not valid UTF-8")
        assert list(tmp_path.iterdir()) == []

    def test_model_that_is_neither_directory_nor_hub_id(self, kcap: Kcap, tmp_path: Path) -> None:
        failed(kcap("record", "--model", "nothing", "-o", tmp_path / "out"), 2, "unknown model nothing")

    @pytest.mark.parametrize("model", ["./nothing", "../nothing", "/nothing", "~/nothing", "a/b/c"])
    def test_a_directory_that_is_not_there(
        self, model: str, kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.chdir(tmp_path)
        failed(kcap("record", "--model", model, "-o", "out"), 2, f"no such model directory: {model}")

    @pytest.mark.parametrize("model", ["no body/nothing", "nobody/no:thing"])
    def test_what_is_no_hub_id(self, model: str, kcap: Kcap, tmp_path: Path) -> None:
        failed(kcap("record", "--model", model, "-o", tmp_path / "out"), 2, f"unknown model {model}")

    def test_coverage_without_a_gpu(self, kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        ran = kcap("record", "--check-coverage", "-o", tmp_path / "out", "--", "true")
        failed(ran, 2, "--check-coverage compares with what ran on a GPU", "this machine has none")

    def test_an_output_that_is_being_written(self, kcap: Kcap, tmp_path: Path) -> None:
        with kcap_package.record(tmp_path / "out"):
            ran = kcap("record", "-o", tmp_path / "out", "--force", "--", "true")
            failed(ran, 2, f"{tmp_path / 'out'} is being written by process {os.getpid()}")
        failed(kcap("record", "-o", tmp_path / "out", "--", "true"), 2, "already exists")

    def test_directory_without_a_config(self, kcap: Kcap, tmp_path: Path) -> None:
        failed(kcap("record", "--model", tmp_path, "-o", tmp_path / "out"), 2, "no config.json")

    def test_config_that_is_no_json(self, kcap: Kcap, tmp_path: Path) -> None:
        for text, why in (("{", ""), ("[1, 2]", "no JSON object"), ("null", "no JSON object")):
            (tmp_path / "config.json").write_text(text)
            failed(kcap("record", "--model", tmp_path, "-o", tmp_path / "out"), 2, f"{tmp_path}/config.json", why)

    def test_unknown_framework_lists_those_that_are_known(self, kcap: Kcap, tmp_path: Path) -> None:
        ran = kcap("record", *TINY, "--framework", "Triton", "-o", tmp_path / "out")
        failed(ran, 2, "unknown framework Triton", "vLLM", "SGLang")

    def test_neither_or_both_of_model_and_command(self, kcap: Kcap, tmp_path: Path) -> None:
        failed(kcap("record", "-o", tmp_path / "out"), 2, "--model MODEL or -- COMMAND")
        failed(kcap("record", *TINY, "-o", tmp_path / "out", "--", "true"), 2, "--model MODEL or -- COMMAND")

    @pytest.mark.parametrize("options", [("--num-prompts", "8"), ("--eager",), ("--engine-arg", "a=1"), TINY[2:]])
    def test_an_option_that_a_command_would_not_heed(
        self, options: tuple[str, ...], kcap: Kcap, tmp_path: Path
    ) -> None:
        failed(kcap("record", *options, "-o", tmp_path / "out", "--", "true"), 2, f"{options[0]}: of --model only")

    @pytest.mark.parametrize("word", ["nothing", "=3", "a b=1", "1x=2"])
    def test_engine_argument_that_is_no_pair(self, word: str, kcap: Kcap, tmp_path: Path) -> None:
        failed(kcap("record", *TINY, "--engine-arg", word, "-o", tmp_path / "out"), 2, "KEY=VALUE", word)

    def test_bad_line_of_prompts_is_named(self, kcap: Kcap, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text("[1, 2]\n[1, x]\n")
        ran = kcap("record", *TINY, "--prompts", tmp_path / "p.jsonl", "-o", tmp_path / "out")
        failed(ran, 1, f"{tmp_path / 'p.jsonl'}:2: ")

    @pytest.mark.parametrize("model", ["kcap/tiny-llama", str(find_config("kcap/tiny-llama"))])
    def test_texts_for_a_model_without_a_tokenizer(self, model: str, kcap: Kcap, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('"a text"\n')
        ran = kcap("record", "--model", model, "--prompts", tmp_path / "p.jsonl", "-o", tmp_path / "out")
        failed(ran, 2, "no tokenizer", "token ids")
        assert "the hub" not in ran.err

    def test_existing_output_is_kept(self, kcap: Kcap, recording: Path) -> None:
        failed(kcap("record", *TINY, "-o", recording), 2, "already exists", "--force")
        assert kcap_package.load(recording).calls

    def test_force_replaces_recordings_only(self, kcap: Kcap, tmp_path: Path) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "file").write_text("mine")
        failed(kcap("record", *TINY, "--force", "-o", tmp_path / "precious"), 2, "no Recording")
        assert (tmp_path / "precious" / "file").read_text() == "mine"

    def test_an_engine_log_that_cannot_be_written(self, kcap: Kcap, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for log, why in (
            ("no/log", "No such file"),
            ("pipe", "a regular file"),
            ("out/log", "outside of"),
            ("out", "outside of"),
            ("", "file"),
        ):
            ran = kcap("record", *TINY, "--engine-log", tmp_path / log, "-o", tmp_path / "out")
            failed(ran, 2, f"--engine-log {tmp_path / log}: ", why)

    def test_an_engine_log_in_a_recording_and_one_of_a_call_that_is_refused(
        self, kcap: Kcap, recording: Path, tmp_path: Path
    ) -> None:
        ran = kcap("record", *TINY, "--engine-log", recording / "calls.jsonl", "-o", tmp_path / "out")
        failed(ran, 2, "put it outside of that Recording")
        failed(kcap("record", *TINY, "--engine-log", tmp_path / "log", "-o", recording), 2, "already exists")
        assert kcap_package.load(recording).calls and not (tmp_path / "log").exists()

    def test_a_commands_output_is_its_users(self, kcap: Kcap, tmp_path: Path) -> None:
        ran = kcap("record", "--engine-log", tmp_path / "log", "-o", tmp_path / "out", "--", "true")
        failed(ran, 2, "--engine-log: of --model or a --client only", "2>&1 | tee")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_left_behind(self, kcap: Kcap, tmp_path: Path) -> None:
        kcap("record", "--model", "nothing", "-o", tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_installed_has_its_install_command(
    kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a))
    ran = kcap("record", *TINY, "-o", tmp_path / "out")
    failed(ran, 1, "vLLM is not installed", f"{sys.executable} -m pip install")


def test_a_command_that_cannot_start(kcap: Kcap, tmp_path: Path) -> None:
    failed(kcap("record", "-o", tmp_path / "out", "--", "/no/such/engine"), 1, "cannot start /no/such/engine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        (("-c", "pass"), 1, "the command imports no torch"),
        (("-c", "raise SystemExit(3)"), 3, "the command ended (status 3) before it imported torch"),
        (("nosuch.py",), 2, "the command ended (status 2) before it imported torch"),
        (
            ("-I", "-c", "import torch"),
            1,
            f"{sys.executable} ran no Python that kcap could follow; it follows none with",
        ),
    ],
)
def test_a_command_without_a_recorder_in_it_is_told_why(
    program: tuple[str, ...], code: int, reason: str, kcap: Kcap, tmp_path: Path
) -> None:
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, *program)
    failed(ran, code, f"nothing was recorded: {reason}")
    assert "vLLM" not in ran.err and "installed" not in ran.err
    assert not (tmp_path / "out").exists()


def test_an_environment_without_kcap_is_named(kcap: Kcap, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    ran = kcap("record", "-o", tmp_path / "out", "--", python, "-c", "pass")
    failed(ran, 1, f"kcap is not installed in the environment of {python}")


@pytest.mark.parametrize("variable", ["VLLM_PLUGINS", "SGLANG_PLUGINS"])
def test_plugins_that_leave_kcap_out_are_named(
    variable: str, kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "other,more")
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, "-I", "-c", "pass")
    failed(ran, 1, f"{variable}=other,more leaves it out", "add kcap")


def test_plugins_that_leave_kcap_out_are_named_before_an_engine_is_started(
    kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    ran = kcap("record", *TINY, "-o", tmp_path / "out")
    failed(ran, 2, "vLLM would not load kcap: VLLM_PLUGINS= leaves kcap out: export VLLM_PLUGINS=kcap")


@pytest.mark.parametrize("listed", ["", "kcap", "other, kcap"])
def test_sglang_plugins_that_let_kcap_in_are_not_blamed(
    listed: str, kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, "-I", "-c", "pass")
    failed(ran, 1, "ran no Python that kcap could follow")


def test_an_sglang_without_plugins_names_those_that_have_them(
    kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    ran = kcap("record", *TINY, "--framework", "sglang", "-o", tmp_path / "out")
    failed(ran, 1, "this SGLang loads no plugins: 0.5.11 or newer does")


STANDS_FOR_AN_ENGINE = """
import os
from kcap.capture.session import SESSION_VARIABLE, read_session
from kcap.capture.window.window import StepShape, Window
import torch
window = Window(read_session(os.environ[SESSION_VARIABLE]))
window.register()
window.start()
a = torch.eye(4)
for step in range(3):
    window.begin(StepShape("decode", [1], [step]))
    torch.mm(a, a)
    window.end()
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("os.kill(os.getpid(), 9)", 137), ("window.failed(ValueError('x'))", 3)]
)
def test_the_exit_code_says_complete_or_partial(ending: str, code: int, kcap: Kcap, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STANDS_FOR_AN_ENGINE + ending)
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, script)
    assert ran.code == code, ran.err
    recording = kcap_package.load(tmp_path / "out")
    assert recording.metadata.steps == {"decode": 3}
    assert recording.metadata.complete is (code == 0)
    assert ("partial" in ran.err) is (code != 0)
    assert f"Next: kcap show {tmp_path / 'out'}" in ran.err


@pytest.mark.parametrize(
    ("ending", "how", "code"),
    [
        ("raise RuntimeError('no memory')", "1", 1),
        ("sys.exit(7)", "7", 7),
        ("os.kill(os.getpid(), 15)", "-15 (SIGTERM)", 143),
    ],
)
@pytest.mark.parametrize("exit_code", [None, "kcap"])
def test_a_command_that_fails_leaves_its_recording_and_its_status(
    ending: str, how: str, code: int, exit_code: str | None, kcap: Kcap, tmp_path: Path
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STANDS_FOR_AN_ENGINE + "window.close()\nimport sys\n" + ending)
    options = ("--exit-code", exit_code) if exit_code else ()
    ran = kcap("record", "-o", tmp_path / "out", *options, "--", sys.executable, script)
    assert ran.code == (3 if exit_code else code), ran.err
    assert f"kcap: the command ended with status {how}\nNext: kcap show" in ran.err
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.steps, metadata.notes) == ({"decode": 3}, [f"the command ended with status {how}"])


def test_the_exit_code_is_of_a_command_only(kcap: Kcap, tmp_path: Path) -> None:
    failed(kcap("record", *TINY, "--exit-code", "kcap", "-o", tmp_path / "out"), 2, "--exit-code: of a COMMAND")


ASKS = """
import sys
assert sys.argv[1:] == ["--model", "m", "--force"], sys.argv
assert sys.stdin.read() == "what it is told", "its standard input"
"""


def test_a_command_has_its_own_options_and_kcaps_standard_input(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(STANDS_FOR_AN_ENGINE + ASKS)
    words = ["record", "-o", "out", sys.executable, "engine.py", "--model", "m", "--force"]
    ran = subprocess.run(
        [sys.executable, "-m", "kcap", *words], input="what it is told", cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


GOES_ON = """
import time
while True:
    window.begin(StepShape("decode", [1], [1]))
    torch.mm(a, a)
    window.end()
    open("up", "w").close()
    time.sleep(0.01)
"""


def test_what_a_command_leaves_running_closes_its_shard_and_is_ended(
    kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.py").write_text(STANDS_FOR_AN_ENGINE + GOES_ON)
    monkeypatch.chdir(tmp_path)
    leaves = f"{sys.executable} engine.py & echo $$ >group; while [ ! -e up ]; do sleep 0.1; done"
    ran = kcap("record", "-o", "out", "--", "sh", "-c", leaves)
    assert ran.code == 0, ran.err
    assert ended(int(Path("group").read_text()))
    recording = kcap_package.load("out")
    assert recording.metadata.complete
    assert recording.metadata.steps["decode"] > 3


@pytest.mark.parametrize(
    ("instead", "options", "reason"),
    [
        (("a = torch.eye(4)", "raise SystemExit(5)"), (), "the engine ended before its first step, with status 5"),
        (("eye(4)", "eye(4, device='meta')"), (), "3 steps ended while the window was open"),
        (("", ""), ("--window", "manual"), NEVER_OPENED),
    ],
)
def test_a_server_that_fails_without_a_call_is_told_why(
    instead: tuple[str, str], options: tuple[str, ...], reason: str, kcap: Kcap, tmp_path: Path
) -> None:
    server = tmp_path / "vllm"
    server.write_text(f"#!{sys.executable}\n{STANDS_FOR_AN_ENGINE.replace(*instead)}\nraise SystemExit(5)\n")
    server.chmod(0o755)
    ran = kcap("record", "-o", tmp_path / "out", *options, "--", server, "serve", "model")
    assert (ran.code, reason in ran.err, "Traceback" in ran.err) == (5, True, False), ran.err
    assert (tmp_path / "out").exists() == ("first step" not in reason)


NOTHING = (sys.executable, "-c", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--", *NOTHING, "vllm", "serve"), True),
        (("--framework", "vllm", "--", *NOTHING), True),
        (("--framework", "vllm", "--", "true"), False),  # of what another environment has kcap knows no version
        (("--framework", "pytorch", "--", *NOTHING), False),
        (("--", *NOTHING), False),
    ],
)
def test_of_an_engine_newer_than_any_tried_a_command_is_told(
    words: tuple[str, ...], told: bool, kcap: Kcap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "version_of", lambda *names: "999.0")
    said = kcap("record", "-o", tmp_path / "out", *words).err
    assert ("kcap: vLLM 999.0 is newer than" in said and "hooks are there" in said) == told
    assert ("999.0" in said) == told


def test_an_engine_that_could_not_be_hooked_hints_at_its_version(kcap: Kcap, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STANDS_FOR_AN_ENGINE + "window.failed(AttributeError('no sample_tokens'))")
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, script)
    assert ran.code == 3
    assert "AttributeError: no sample_tokens; kcap doctor says which hooks an engine has" in ran.err


NO_STEP = "no torch.nn.Module was called: bracket the program's work in `with kcap.step():`"
NO_DATA = "3 steps ended while the window was open, and no operator was called there on tensors with data"


@pytest.mark.parametrize(
    ("instead", "reason"), [(("range(3)", "range(0)"), NO_STEP), (("eye(4)", "eye(4, device='meta')"), NO_DATA)]
)
def test_an_engine_that_ran_no_kernel_is_an_error_with_the_recording_kept(
    instead: tuple[str, str], reason: str, kcap: Kcap, tmp_path: Path
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(STANDS_FOR_AN_ENGINE.replace(*instead))
    ran = kcap("record", "-o", tmp_path / "out", "--", sys.executable, script)
    assert ran.code == 1
    why = f"nothing was recorded: {reason}"
    assert f"kcap: {why}\n" in ran.err
    assert ran.err.endswith(f"Next: kcap record --force -o {tmp_path / 'out'} -- {sys.executable} {script}\n")
    metadata = kcap_package.load(tmp_path / "out").metadata
    assert (metadata.notes, metadata.framework) == ([why], None)


def test_a_recording_stays_where_nothing_was_recorded(kcap: Kcap, recording: Path) -> None:
    ran = kcap("record", "--force", "-o", recording, "--", sys.executable, "-c", "import torch; raise SystemExit(7)")
    assert ran.code == 7 and ran.err.endswith(f"; {recording} stays as it was\n")
    assert kcap_package.load(recording).kernels() and not list(recording.parent.glob(".*.kcap.*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a=1", "b=true", "c-d=x"), {"a": 1, "b": True, "c_d": "x"}),
        (('e={"f": [1, 2]}', "g=None", "h=False"), {"e": {"f": [1, 2]}, "g": None, "h": False}),
        (("i=", "j=a=b", "k=1.5"), {"i": "", "j": "a=b", "k": 1.5}),
    ],
)
def test_engine_arguments_are_json_where_they_parse(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert offline.engine_arguments(words) == expected


def test_an_engine_argument_without_a_key_is_wrong() -> None:
    with pytest.raises(CallError):
        offline.engine_arguments(("=1",))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("6m")` mounts a file system of that size."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = []

    def mount(size: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(place)
        return place

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


FILLING = """
import sys
import torch, kcap
a = torch.eye(4)
with torch.no_grad(), kcap.record(sys.argv[1], recorder=sys.argv[3]):
    for i in range(int(sys.argv[2])):
        torch.cat((1 + i) * [a])  # a longer line each
        for _ in range(10):
            torch.exp(a)
    print("the program ended")
"""


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_disk_without_room_for_the_counts_does_not_hurt_the_program(
    recorder: str, small_disk: Callable[[str], Path], python: Python
) -> None:
    disk = small_disk("2m")
    ran = python(FILLING, disk / "out", 3, recorder)
    assert (ran.returncode, ran.stdout) == (0, "the program ended\n"), ran.stderr
    recording = kcap_package.load(disk / "out")
    assert not recording.metadata.complete
    assert any("No space left" in tap.detail for tap in recording.metadata.taps)


@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_disk_that_fills_loses_nothing_that_was_recorded(
    recorder: str, small_disk: Callable[[str], Path], python: Python, kcap: Kcap, tmp_path: Path
) -> None:
    disk = small_disk("5300k")
    ran = python(FILLING, disk / "out", 250, recorder)
    assert ran.stdout == "the program ended\n"
    assert "No space left on device: what was recorded is in" in ran.stderr
    (left,) = disk.glob(".out.*")
    assert f"kcap recover {left} -o {disk / 'out'}" in ran.stderr
    recovered = kcap("recover", left, "-o", tmp_path / "out")
    assert recovered.code == 3, recovered.err
    recording = kcap_package.load(tmp_path / "out")
    assert sum(call.total for call in recording.kernels() if call.operator == "aten::exp") > 500
    assert [tap.status for tap in recording.metadata.taps if tap.status not in ("ok", "absent")] == ["failed"]


@pytest.mark.parametrize(("free", "said"), [(0, "holds only a part"), (1 << 20, "its whole output")])
def test_a_log_on_a_full_disk_is_not_called_whole(
    free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: (1 << 30, (1 << 30) - free, free))
    log = tmp_path / "log"
    log.write_text("ValueError: no such argument\n")
    session = Session(directory=str(tmp_path / "shards"))
    with pytest.raises(KcapError, match=said):
        run.explain_silence(session, 1, log)


def test_nothing_to_recover(kcap: Kcap, tmp_path: Path) -> None:
    failed(kcap("recover", tmp_path, "-o", tmp_path / "out"), 2, "nothing to recover")


def test_a_session_survives_its_file(tmp_path: Path) -> None:
    from kcap.capture.session import Session, read_session

    session = Session(str(tmp_path / "s"), model="m", steps=3, command=["a", "b"], engine_arguments={"x": [1]})
    session.write()
    assert read_session(session.file) == session
    assert json.loads(session.file.read_bytes())["steps"] == 3
