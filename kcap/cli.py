"""The `kcap` command: each subcommand's module is imported only when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from kcap.errors import FAILED, INSTALL_TORCH, USAGE, KcapError
from kcap.system.standard_error import lossy_standard_error
from kcap.version import __version__

# name -> (module, one line of help): help is kept here so that `kcap --help` imports none of them
COMMANDS = {
    "record": ("kcap.commands.record", "Record what an inference engine runs."),
    "window": ("kcap.commands.window", "Open or close the window of a recording that runs."),
    "recover": ("kcap.commands.recover", "Make a Recording of what an interrupted one left."),
    "show": ("kcap.commands.show", "Show what ran: by kernel, operator, family, phase or rank."),
    "gain": ("kcap.commands.gain", "Show what could be gained, and where a kernel can be put in."),
    "report": ("kcap.commands.report", "Write what was recorded as one HTML file."),
    "replay": ("kcap.commands.replay", "Rebuild recorded calls and time them."),
    "bench": ("kcap.commands.bench", "Judge kernels that others wrote for what was recorded."),
    "apply": ("kcap.commands.apply", "Choose which judged kernels are put into the engine."),
    "run": ("kcap.commands.run", "Start an engine with a plan's kernels in place."),
    "ab": ("kcap.commands.ab", "Measure what a plan's kernels gain in the engine."),
    "task": ("kcap.commands.task", "Write one Definition as a folder for whoever writes a kernel for it."),
    "judge": ("kcap.commands.judge", "Judge one Solution of a task: right, how fast, what it gains."),
    "export": ("kcap.commands.export", "Write what was recorded in another benchmark's format."),
    "validate": ("kcap.commands.validate", "Tell what is wrong with files of any format that kcap knows."),
    "merge": ("kcap.commands.merge", "Make one Recording or dataset of several."),
    "diff": ("kcap.commands.diff", "Compare two Recordings, trace files or datasets."),
    "doctor": ("kcap.commands.doctor", "Tell what of this machine kcap can use."),
}

UNIX_MODULES = ("fcntl", "resource", "termios")  # that Windows lacks


class LazyGroup(click.Group):
    """A click group that finds `command` in a subcommand's module at its first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kcap")
def group() -> None:
    """Record the operator calls of running inference engines and replay them as benchmarks.

    \b
    Example:
      kcap record --model meta-llama/Llama-3.1-8B --framework vLLM -o llama.kcap
      kcap show llama.kcap
      kcap replay llama.kcap
    """


@atexit.register
def _end_quickly() -> None:
    """The interpreter's end looks through all objects once more: through torch's for up to some seconds.

    Not with Triton, whose bindings would say that its objects leak.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a `KcapError` becomes one line on standard error and its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a terminal that is not of UTF-8 would end a command
        sys.stdout.reconfigure(errors="replace")
    with lossy_standard_error():
        _run(args)


def _run(args: Sequence[str] | None) -> NoReturn:
    try:
        sys.exit(group.main(args=args, prog_name="kcap", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("kcap: stopped", err=True)
        sys.exit(FAILED)
    except KcapError as error:
        click.echo(f"kcap: {error}", err=True)
        sys.exit(error.exit_code)
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            click.echo(f"kcap: this needs PyTorch, which is not installed: {INSTALL_TORCH}", err=True)
            sys.exit(USAGE)
        if isinstance(error, ModuleNotFoundError) and error.name in UNIX_MODULES:
            click.echo(
                "kcap: this needs Linux; elsewhere, kcap shows, validates, compares, merges and exports", err=True
            )
            sys.exit(USAGE)
        if _torch_failed(error):
            reason = str(error).partition("\n")[0]
            click.echo(f"kcap: this needs PyTorch, which does not import here ({reason}): kcap doctor", err=True)
            sys.exit(USAGE)
        if isinstance(error, ImportError):
            raise
        click.echo(f"kcap: {error.strerror or error}: {error.filename or 'output'}", err=True)
        sys.exit(FAILED)


def _torch_failed(error: BaseException) -> bool:
    """Whether it was raised while torch was being imported."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "torch" and frame.f_code.co_name == "<module>" for frame in frames)
