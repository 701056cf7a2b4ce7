"""The command `orthomerge`: parse, call the library, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from orthomerge.core.errors import OrthomergeError
from orthomerge.core.version import VERSION

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 3.0  # seconds after a signal in which others are ignored

_GROUPS = {  # names of commands; each is a module of this package
    "Make": ("merge",),
    "Use": ("export", "push"),
    "Judge": ("evaluate", "diagnose", "inspect"),
    "Research": ("finetune", "align", "negate", "analogy", "run", "report", "reproduce", "list"),
}
_EXAMPLES = """
  orthomerge merge topic tone=tone.pth --base base --out merged
  orthomerge merge topic tone --base base --data texts --out merged
  orthomerge evaluate merged --data texts
"""
_NOTES = """
-h after a command shows its flags. All commands take --json, -q and -v.
Completion:  eval "$(_ORTHOMERGE_COMPLETE=bash_source orthomerge)"  (zsh, fish)
Exit codes: 0 done, 2 arguments, 3 checkpoint, 4 inputs do not fit together,
5 output, 6 NaN or overflow, 130/143 interrupted.
"""


class _App(click.Group):
    """Group of all commands, with examples on its help screen; a command is imported when it is used."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load(cmd_name) if cmd_name in self.commands else None

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, examples, commands and notes."""
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS]")
        self.format_help_text(ctx, formatter)
        formatter.write(_EXAMPLES)
        for title, names in _GROUPS.items():
            formatter.write(f"\n{title}:\n")
            for name in names:
                formatter.write(f"  {name:<10} {_load(name).get_short_help_str(70).rstrip('.')}\n")
        with formatter.section("Options"):
            rows = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
            formatter.write_dl([row for row in rows if row is not None])
        formatter.write(_NOTES)


def _load(name: str) -> click.Command:
    command: click.Command = getattr(import_module(f"orthomerge.cli.{name}"), name)
    return command


app = _App(
    "orthomerge",
    commands=[click.Command(name) for names in _GROUPS.values() for name in names],  # imported when used
    help="Merge fine-tuned classifiers into one encoder with all their labels.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[],
)
click.version_option(VERSION, "-V", "--version", prog_name="orthomerge", message="%(prog)s %(version)s")(app)


def _handle_signals() -> list[int]:
    """Exit with cleanup on SIGINT and SIGTERM, which the returned list receives; ignore a second one within seconds."""
    last, received = -_PATIENCE, list[int]()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _PATIENCE:
            last = time.monotonic()
            received.append(number)
            raise SystemExit(128 + number)

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        """Send the signal again, since Python drops exceptions that are raised inside a `__del__`."""
        nonlocal last
        if not (received and isinstance(ignored.exc_value, SystemExit)):
            sys.__unraisablehook__(ignored)
            return
        last = -_PATIENCE
        threading.Timer(0.01, os.kill, (os.getpid(), received[0])).start()

    for number in _SIGNALS:
        signal.signal(number, stop)
    sys.unraisablehook = raise_again
    return received


def main() -> None:
    """Run a command; our errors become a message and an exit code, with a traceback only for `--verbose`."""
    received = _handle_signals()
    try:
        code = app.main(prog_name="orthomerge", standalone_mode=False)
    except (SystemExit, Exception) as error:
        # Libraries that are interrupted during their import may raise another error.
        if received:
            sys.stderr.write("orthomerge: interrupted; nothing half-written was left behind; run again to continue\n")
            raise SystemExit(128 + received[0]) from None
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            sys.stderr.write(f"{error.format_message()}\n")
            raise SystemExit(error.exit_code) from None
        if isinstance(error, OrthomergeError):
            message, code = str(error), error.exit_code
            if {"-v", "--verbose"} & set(sys.argv):
                traceback.print_exc()
        elif isinstance(error, click.ClickException):
            context = getattr(error, "ctx", None)
            path = "orthomerge" if context is None else context.command_path
            message, code = f"{error.format_message()}\nTry: {path} -h", error.exit_code
        elif isinstance(error, OSError):  # for example of standard output; files have their own errors
            message, code = error.strerror or str(error), 1
        else:
            raise
        sys.stderr.write(f"orthomerge: {message}\n")
        raise SystemExit(code) from None
    raise SystemExit(code)


def run() -> NoReturn:
    """Run a command as the script `orthomerge`, and end the process at once.

    An ordinary exit unloads torch module by module, which takes as long as a small merge. So does collecting garbage
    among the million objects that its import makes, all of which stay.
    """
    gc.set_threshold(100_000, 50, 100)
    # Let glibc keep freed blocks: memory that goes back to the kernel after each tensor costs page faults again.
    with suppress(OSError, AttributeError):
        tune = ctypes.CDLL("libc.so.6").mallopt
        tune(_M_MMAP_THRESHOLD, 32 << 20)
        tune(_M_TRIM_THRESHOLD, 256 << 20)
    code = 0
    try:
        main()
    except SystemExit as done:
        if done.code not in (0, None):
            raise
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # all is done
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        sys.stderr.write(f"orthomerge: cannot write to standard output: {error.strerror}\n")
        code = 1
    os._exit(code)
