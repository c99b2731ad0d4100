"""The ``mlx-mtp`` command."""

from __future__ import annotations

import argparse
import os
import sys

from .. import blas


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 2 for a bad argument or model."""
    try:
        return _run(argv)
    except BrokenPipeError:
        # Nobody reads on; the interpreter must not write to the pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        print(f"mlx-mtp: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str] | None) -> int:
    # Before anything imports MLX.
    blas.load_openblas()
    from . import bench, chat, doctor, generate, info, tune, verify

    parser = argparse.ArgumentParser(
        prog="mlx-mtp",
        description="Exact multi-token-prediction speculative decoding for MLX.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (generate, chat, info, doctor, verify, tune, bench):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name,
            help=module.__doc__.splitlines()[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args) or 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
