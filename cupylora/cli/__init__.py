"""The command line. Subcommands are imported when they are called, so ``--help`` is quick.

Exit codes of every command: 0 success, 1 a check failed or an adapter is refused, 2 wrong usage or
input, too little memory, or output that cannot be written (one clear line on stderr), 130
interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import unicodedata
from typing import Any

import click

from cupylora import __version__
from cupylora.cli._streams import discard_unwritable, echo, open_streams
from cupylora.errors import CupyloraError

__all__ = ["main"]

_LONGEST_PATH, _SHOWN = 400, 60
_USAGE, _INTERRUPTED, _NO_READER = 2, 130, 141

# Command -> (module that defines it as ``command``, what it does).
_COMMANDS = {
    "run": ("cupylora.cli.run", "Run a mixed batch of adapters through a model's layers."),
    "inspect": ("cupylora.cli.inspect", "Show what an adapter holds, and what is wrong with it."),
    "bench": ("cupylora.cli.bench", "Time the LoRA kernels on this GPU, beside floors and peers."),
    "doctor": ("cupylora.cli.doctor", "Say whether the GPU can be used, and what is missing."),
    "export": ("cupylora.cli.export", "Write cubins, a manifest and C headers for other stacks."),
    "pack": ("cupylora.cli.pack", "Write adapters as the device keeps them, for C hosts."),
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
    """The lazy table as a click group, and where every failure becomes a line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's, on streams that take any character."""
        if sys.stdout is None:  # closed (``>&-``): files opened later would get its number
            echo("cupylora: standard output is closed; send it somewhere", err=True)
            sys.exit(_USAGE)
        open_streams()
        try:
            return super().main(*args, **extra)
        except OSError as error:  # of --help and --version, which are written before ``invoke``
            sys.exit(_end(*_os_failure(error)))

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
            failure = (_USAGE, str(error))
        except click.UsageError as error:
            path = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            failure = (_USAGE, f"{error.format_message().rstrip('.')} (see {path} --help)")
        except OSError as error:
            failure = _os_failure(error)
        except MemoryError as error:
            failure = (_USAGE, _memory_failure(error))
        except KeyboardInterrupt:
            failure = (_INTERRUPTED, "interrupted")
        return ctx.exit(_end(*failure))


def _end(code: int, message: str) -> int:
    """Write the one line there is to say; returns ``code``."""
    discard_unwritable()
    if message:
        with contextlib.suppress(OSError):
            echo(f"cupylora: {_escaped(message)}", err=True)
    return code


def _escaped(message: str) -> str:
    """Without control characters, which a path may hold and a terminal would obey."""
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in message
    )


def _os_failure(error: OSError) -> tuple[int, str]:
    if isinstance(error, BrokenPipeError):
        return _NO_READER, ""
    reason = error.strerror or str(error)
    if error.filename is None:
        return _USAGE, f"reading or writing failed: {reason}"
    return _USAGE, f"{_shortened(str(error.filename))}: {reason}"


def _memory_failure(error: MemoryError) -> str:
    detail = f" ({error})" if str(error) else ""
    remedy = "use fewer tokens, layers or adapters, or smaller ranks"
    return f"there is not enough memory{detail}; {remedy}"


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST_PATH else f"{path[:_SHOWN]}...{path[-_SHOWN:]}"


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="cupylora")
def main() -> None:
    """Multi-LoRA inference without torch: see it run, and check this machine."""
