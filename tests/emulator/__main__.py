"""Random LoRA deltas for as long as one likes: ``python -m tests.emulator --seconds 600``."""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_forms import DEFINES, SHIPPED, find_form, installed

from .build import missing_tools
from .device import Device
from .lora_cases import HOSTILE, KERNELS, check, draw


@click.command()
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Begin no case after.")
@click.option("--kernel", type=click.Choice(KERNELS), help="Only this one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first case.")
@click.option("--cases", type=int, help="At most so many.")
@click.option("--hostile", type=click.Choice(HOSTILE), help="Only such batches.")
@click.option("--crowded", is_flag=True, help="Many small groups in few large clusters.")
@click.option("--small", is_flag=True, help="Fewer features.")
@click.option("--define", "defines", multiple=True, help="NAME=VALUE of lora/tuning.cuh.")
@click.option("--strict-push", is_flag=True, help="st.async orders its own bytes and no more.")
def main(
    seconds: float,
    kernel: str | None,
    seed: int,
    cases: int | None,
    hostile: str | None,
    crowded: bool,
    small: bool,
    defines: tuple[str, ...],
    strict_push: bool,
) -> None:
    """Run drawn batches on the emulated device; a failure is told with its seed."""
    if lacking := missing_tools():
        raise click.ClickException(lacking)
    failed, done, begin = 0, 0, time.monotonic()
    pairs = [setting.partition("=")[::2] for setting in defines]
    if unknown := {name for name, _ in pairs} - set(DEFINES):
        raise click.UsageError(f"lora/tuning.cuh has no {', '.join(sorted(unknown))}")
    form = SHIPPED.with_defines(**{name: int(value) for name, value in pairs})
    with Device(find=find_form).installed() as device, installed(form):
        for number in itertools.islice(itertools.count(seed), cases):
            case = draw(number, kernel=kernel, hostile=hostile, crowded=crowded, small=small)
            try:
                check(device, case, strict_push=strict_push)
            except Exception:
                failed += 1
                click.echo(f"seed {number}\n{traceback.format_exc(limit=-1)}")
            done += 1
            if time.monotonic() - begin > seconds:
                break
    click.echo(f"{done} cases in {time.monotonic() - begin:.0f} s, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(prog_name="python -m tests.emulator")
