"""``hybrid-pack``: the group of commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from functools import partial

import click

from hybrid_pack._version import __version__
from hybrid_pack.cli.streams import drop_stdout, in_echo, open_streams, stdout_failure, terminable
from hybrid_pack.errors import EnvironmentFailure, HybridPackError, hide_tokens, plain, system_failure

COMMANDS = {
    "plan": "Choose the kept experts, by saliency and budget.",
    "convert": "Write a pack from a checkpoint and its bit map.",
    "verify": "Prove a pack, alone or against its source.",
    "inspect": "Show a checkpoint or a pack from its headers.",
    "report": "Show a pack in pictures: a page, or PNG files.",
    "doctor": "Show what this machine can run, and what is missing.",
    "bench": "Time loading a rank and running a layer.",
    "push": "Put a pack on the Hugging Face Hub.",
    "pull": "Bring a rank of a pack from the Hub, checked on arrival.",
}
"""Name and help of each command; its module is imported only when it runs."""

INTERRUPTED = 130
TERMINATED = 143


class LazyGroup(click.Group):
    """Imports a command's module when it is called, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hybrid_pack.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybrid-pack")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Convert mixed-precision MoE checkpoints, once and offline, into per-rank shards for the serving kernel.

    Exit codes: 0 done, 1 the data is wrong, 2 usage, 3 the environment failed (disk full, permission, ...),
    130 interrupted by Ctrl-C, 143 ended by SIGTERM.
    """
    ctx.obj = debug


def _fail(error: BaseException, line: str, code: int, *, debug: bool) -> int:
    if debug:
        click.echo(hide_tokens("".join(traceback.format_exception(error))), nl=False, err=True)
    with contextlib.suppress(OSError):  # a stderr that takes nothing changes no exit code
        click.echo(f"hybrid-pack: {hide_tokens(plain(' '.join(line.split())))}", err=True)
    return code


def _usage(error: click.ClickException) -> str:
    """The message with its command, and where to look."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "hybrid-pack"
    at = path.removeprefix("hybrid-pack").strip()
    return f"{at + ': ' if at else ''}{error.format_message()} (see {path} --help)"


def _interrupted(command: str) -> str:
    kept = {
        "convert": "; finished files are kept for --resume",
        "pull": "; finished files are kept: run it again",
        "push": "; what was sent is kept: run it again",
    }
    return f"interrupted{kept.get(command, '')}"


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    open_streams()
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]  # wherever it is put
    given = [a for a in given[:end] if a != "--debug"] + given[end:]
    fail = partial(_fail, debug=debug)
    if not given:
        click.echo(cli.get_help(click.Context(cli, info_name="hybrid-pack")), err=True)
        return 2
    with terminable() as signals:
        try:
            result = cli.main(given, prog_name="hybrid-pack", standalone_mode=False)
            return result if isinstance(result, int) else 0
        except HybridPackError as error:
            return fail(error, str(error), error.exit_code)
        except click.ClickException as error:
            return fail(error, _usage(error), 2)
        except (KeyboardInterrupt, click.Abort) as error:
            return fail(error, _interrupted(given[0]), TERMINATED if signals.terminated else INTERRUPTED)
        except (BrokenPipeError, SystemExit):  # SystemExit: what click makes of a broken pipe in any mode
            drop_stdout()
            return EnvironmentFailure.exit_code
        except MemoryError as error:
            return fail(error, "out of memory; try fewer --workers", EnvironmentFailure.exit_code)
        except OSError as error:
            return fail(error, _system(error), EnvironmentFailure.exit_code)
        except Exception as error:
            hint = "please report it with what --debug shows"
            line = f"unexpected error: {type(error).__name__}: {error}; {hint}"
            return fail(error, line, EnvironmentFailure.exit_code)


def _system(error: OSError) -> str:
    return str(stdout_failure(error) if not error.filename and in_echo(error) else system_failure(error))


def main() -> None:
    """Entry point."""
    sys.exit(run())
