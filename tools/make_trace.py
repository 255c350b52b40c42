"""Writes traffic for ``cupylora run --trace``: adapters of Zipf popularity, requests that arrive,
decode and leave.

    python tools/make_trace.py --adapters 64 --steps 1000 --out traffic.jsonl

Requests arrive at random (Poisson), each with an adapter drawn by popularity or with none; its
prompt is one step of many tokens, then it decodes one token a step until it leaves. With
``--churn`` adapters are unloaded now and then, and loaded again by the next request for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

LOOK_AHEAD = 256
"""Requests that others may overtake in a step, as a server would bound it."""
MOST_ARRIVALS = 1e6


def finite(_: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse inf and nan, and more than can be made."""
    if not 0 <= value <= MOST_ARRIVALS:
        raise click.BadParameter(f"{value} is not from 0 to {MOST_ARRIVALS:g}", param=option)
    return value


def zipf_shares(adapters: int, exponent: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Popularity of adapters 0, 1, ...: 1/rank**exponent, as shares."""
    weights = 1.0 / np.arange(1, adapters + 1) ** exponent
    return weights / weights.sum()


def make_traffic(
    *,
    adapters: int,
    steps: int,
    arrivals: float,
    prompt: int,
    output: int,
    max_tokens: int,
    most_adapters: int,
    base_share: float,
    exponent: float,
    churn: float,
    seed: int,
) -> tuple[list[dict[str, Any]], int]:
    """The trace's lines, and how many requests wait at the end. A step takes running requests
    first; what would exceed ``max_tokens`` or ``most_adapters`` waits."""
    rng = np.random.default_rng(seed)
    shares = zipf_shares(adapters, exponent) if adapters else np.zeros(0)
    waiting: list[list[Any]] = []  # [adapter, tokens of the next step, steps of decode left]
    running: list[list[Any]] = []
    lines, seen = [], set()
    for number in range(steps):
        for _ in range(rng.poisson(arrivals)):
            base = not adapters or rng.random() < base_share
            name = None if base else f"lora-{rng.choice(adapters, p=shares)}"
            tokens = int(min(max_tokens, rng.geometric(1 / prompt)))
            waiting.append([name, tokens, int(rng.geometric(1 / output))])
        served = admit(waiting, running, max_tokens, most_adapters)
        line: dict[str, Any] = {"step": number}
        used = {name for name, _, _ in served if name is not None}
        idle = sorted(seen - used)
        if idle and rng.random() < churn:
            line["unload"] = [str(rng.choice(idle))]
        seen |= used
        line["requests"] = [
            {"tokens": tokens} | ({} if name is None else {"adapter": name})
            for name, tokens, _ in served
        ]
        lines.append(line)
        running = [[name, 1, left - 1] for name, _, left in served if left > 0]
    return lines, len(waiting)


def admit(
    waiting: list[list[Any]], running: list[list[Any]], max_tokens: int, most_adapters: int
) -> list[list[Any]]:
    """Requests of one step; those that do not fit stay in ``waiting``, which is changed."""
    served: list[list[Any]] = []
    tokens, names = 0, set()
    for queue in (running, waiting):
        held = []
        for at, request in enumerate(queue):
            if tokens == max_tokens or len(held) == LOOK_AHEAD:
                held += queue[at:]
                break
            name, size, _ = request
            more = names | ({name} if name is not None else set())
            if tokens + size <= max_tokens and len(more) <= most_adapters:
                served.append(request)
                tokens, names = tokens + size, more
            else:
                held.append(request)
        if queue is waiting:
            waiting[:] = held
        else:
            waiting[:0] = held
    return served


@click.command()
@click.option("--adapters", type=click.IntRange(0, 1 << 20), default=32, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True)
@click.option(
    "--arrivals",
    callback=finite,
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Requests that arrive in a step, on average.",
)
@click.option(
    "--prompt",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens of a prompt, on average.",
)
@click.option(
    "--output",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens that a request decodes, on average.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Tokens of a step, at most.",
)
@click.option(
    "--max-adapters",
    "most_adapters",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Adapters of a step, at most (the server's slots).",
)
@click.option(
    "--base-share",
    callback=finite,
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="Requests without an adapter.",
)
@click.option(
    "--exponent",
    callback=finite,
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Of the Zipf law; 0: all equally popular.",
)
@click.option(
    "--churn",
    callback=finite,
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Steps in which an adapter is unloaded.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(out: Path, **options: Any) -> None:
    """Write a trace of steps for cupylora run --trace."""
    try:
        with out.open("w", encoding="utf-8") as file:
            lines, waiting = make_traffic(**options)
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        raise click.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from error
    tokens = [sum(request["tokens"] for request in line["requests"]) for line in lines]
    names = {r.get("adapter") for line in lines for r in line["requests"]} - {None}
    click.echo(
        f"{out}: {len(lines)} steps, {sum(tokens)} tokens (at most {max(tokens)} a step), "
        f"{len(names)} adapters used, {waiting} requests still waiting at the end"
    )


if __name__ == "__main__":
    main()
