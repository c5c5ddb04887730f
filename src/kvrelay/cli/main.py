"""``kvrelay``: finds the command, runs it, and turns every failure into one line on stderr and an exit code.

Exit codes: 0 done, 1 failed, 2 bad usage, 69 no control plane, 70 engine hung, 130 interrupted. Commands are imported
only when they are called, so that ``kvrelay --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem
from click.types import FloatParamType

from kvrelay.cli.log_limit import LineFormatter, LogLimit
from kvrelay.core.child_process import WORKER_PID
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.garbage import collect_seldom
from kvrelay.errors import KvrelayError
from kvrelay.version import __version__

if WORKER_PID in os.environ:
    # In a process that vLLM has spawned for a worker, multiprocessing runs the worker's main module again before it
    # imports anything else. vLLM's own imports take many seconds, in which the worker may end.
    importlib.import_module("kvrelay.engines.vllm.child")

_log = logging.getLogger(__name__)

LOG_LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"
COMMANDS = {
    "serve": ("kvrelay.cli.serve:serve", "Serve a model on this machine, prefill and decode apart."),
    "frontend": ("kvrelay.cli.processes:frontend", "Run a frontend of a cluster."),
    "worker": ("kvrelay.cli.processes:worker", "Run a worker of a cluster."),
    "agent": ("kvrelay.cli.processes:agent", "Offer slots for workers on this host to a planner."),
    "chat": ("kvrelay.cli.chat:chat", "Talk to a model in the terminal."),
    "status": ("kvrelay.cli.cluster:status", "Show a running cluster."),
    "top": ("kvrelay.cli.cluster:top", "Watch a running cluster: workers, queues, KV, rates, slowest requests."),
    "waterfall": ("kvrelay.cli.waterfall:waterfall", "Show where the time of a request went."),
    "drain": ("kvrelay.cli.cluster:drain", "Let a worker finish its work and leave."),
    "revoke-lease": ("kvrelay.cli.cluster:revoke_lease", "Let a worker leave that may not answer."),
    "role": ("kvrelay.cli.cluster:role", "Change a worker's role."),
    "cache": ("kvrelay.cli.cluster:cache", "Forget the prompts whose KV is cached."),
    "planner": ("kvrelay.cli.planner:planner", "Run a planner: how many workers, which role, when."),
    "plan": ("kvrelay.cli.planner:plan_group", "Show what the planner would do, and why; pause it."),
    "config": ("kvrelay.cli.cluster:config", "Read or change a setting of a running cluster."),
    "api-key": ("kvrelay.cli.small:api_key", "Make an API key for a client."),
    "simulate": ("kvrelay.simulate.commands:simulate_command", "Run a cluster in virtual time: what would it do?"),
    "advise": ("kvrelay.simulate.advise_command:advise_command", "Search the best cluster for a load."),
    "doctor": ("kvrelay.certify.doctor_command:doctor_command", "Tell what this machine has for P/D, and lacks."),
    "certify": ("kvrelay.certify.commands:certify_command", "Prove P/D right and fast on this machine."),
    "evaluate": ("kvrelay.evaluate.commands:evaluate_command", "Decide by measuring: P/D apart, or not."),
    "bench": ("kvrelay.bench.commands:bench_group", "Measure servers, the engine, transfers and data sets."),
    "completion": ("kvrelay.cli.small:completion", "Print the completion script of a shell."),
    "make-model": ("kvrelay.cli.small:make_model_command", "Write a checkpoint with random weights."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line help without importing them. ``entries``: by name, the place
    of the command (module:attribute) and its help."""

    def __init__(self, *args: Any, entries: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, name = entry[0].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return _without_nan(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = str(args[0])
        if name not in self.entries and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(name, possibilities=self.entries, ctx=ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Like click's own, without importing any command."""
        names = [
            CompletionItem(name, help=text) for name, (_, text) in self.entries.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.entries.items()])


def _without_nan(command: click.Command) -> click.Command:
    """The command, whose numbers are numbers. No range keeps NaN out: every comparison with it is false."""
    for parameter in command.params:
        if isinstance(parameter.type, FloatParamType):
            parameter.callback = parameter.callback or _number
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _without_nan(inner)
    return command


def _number(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        raise click.BadParameter("nan is not a number", ctx, parameter)
    return value


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(__version__, prog_name="kvrelay")
@click.option(
    "--log-level",
    default="warning",
    envvar=LOG_LEVEL_VARIABLE,
    show_envvar=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
)
def cli(log_level: str) -> None:
    """LLM serving with prefill and decode apart; the KV cache is handed over like a baton.

    Example: kvrelay serve --prefill 1 --decode 1
    """
    os.environ[LOG_LEVEL_VARIABLE] = log_level  # for the processes that the command starts
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogLimit(MonotonicClock()))
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=log_level.upper(), handlers=[handler])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    if os.getpid() == 1:
        from kvrelay.launch.process import go_on_below_init

        go_on_below_init()
    _open_standard_streams()
    collect_seldom()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def _open_standard_streams() -> None:
    """Of stdin, stdout and stderr, what the caller has closed. Else a socket would get its number: text would be
    written to it, and libuv would abort the process when it is closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have characters that a terminal lacks


def run(arguments: list[str], command: click.Command = cli, name: str = "kvrelay") -> int:
    """Run one command; returns the exit code."""
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message())
        return 2
    except click.ClickException as exc:
        return _fail(f"{exc.format_message()}{_hint(exc)}", exc.exit_code)
    except KvrelayError as exc:
        return _fail(exc.message, exc.exit_code)
    except OSError as exc:
        # A file, disk or socket is at fault, in a place that knows no better sentence than the operating system's.
        _log.debug("where it failed:", exc_info=exc)
        return _fail(str(exc) or type(exc).__name__, 1)
    except MemoryError:
        return _fail("there is not enough memory for this: ask for less, or give the process more", 1)
    except (click.Abort, KeyboardInterrupt):
        return 130
    return result if isinstance(result, int) else 0


def _hint(error: click.ClickException) -> str:
    """Advice on bad usage, in parentheses, or an empty text."""
    if isinstance(error, click.NoSuchOption) and error.option_name == "--log-level":
        return " (it stands before the command: kvrelay --log-level debug serve)"
    if isinstance(error, click.UsageError) and error.ctx:
        return f" (see '{error.ctx.command_path} --help')"
    return ""


def _fail(message: str, code: int) -> int:
    text = " ".join(message.split())
    # A server's or a file's own words may stand in it: nothing of them moves the cursor.
    print(f"kvrelay: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)}", file=sys.stderr)
    return code
