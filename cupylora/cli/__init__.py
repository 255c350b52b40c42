"""The command line. Subcommands are imported when they are called, so ``--help`` is quick.

Exit codes of every command: 0 success, 1 a check failed, 2 wrong usage or input (one clear line on
stderr).
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from cupylora import __version__
from cupylora.errors import CupyloraError

__all__ = ["main"]

# Command -> (module that defines it as ``command``, what it does).
_COMMANDS = {
    "run": ("cupylora.cli.run", "Run a mixed batch of adapters through a model's layers."),
    "doctor": ("cupylora.cli.doctor", "Say whether the GPU can be used, and what is missing."),
    "kernels": ("cupylora.cli.kernels", "List the CUDA kernels and their architectures."),
}


class _LazyCommand(click.Command):
    """Stands for a command in ``--help``; becomes the real one when it is called."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        module, _ = _COMMANDS[str(self.name)]
        command: click.Command = importlib.import_module(module).command
        return command.make_context(info_name, args, parent=parent, **extra)


class _Commands(click.Group):
    """The lazy table as a click group; wrong usage or input ends with one line and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        return _LazyCommand(name, help=_COMMANDS[name][1])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CupyloraError as error:
            message = str(error)
        except click.UsageError as error:
            path = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            message = f"{error.format_message().rstrip('.')} (see {path} --help)"
        click.echo(f"cupylora: {message}", err=True)
        return ctx.exit(2)


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="cupylora")
def main() -> None:
    """Multi-LoRA inference without torch: see it run, and check this machine."""
