"""``python -m cupylora``: the command line, where no script of that name is on the path."""

from cupylora.cli import main

if __name__ == "__main__":  # processes that compile import this too
    main(prog_name="cupylora")
