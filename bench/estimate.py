"""Validates and fits the model of time on Apple's GPUs (docs/estimates.md). No time is measured.

    tools/agx/build.sh                  # once
    python bench/estimate.py            # simulates what published times are of again, and fits the model

It writes python/mlx_anvil/mslc/validation.json; the list of published times is kept as it stands there. The kernels are
those of MLX's wheel, simulated and compiled by Mesa for an M1. bench/apple.py has the estimates of ours.
"""

import click
from rich.console import Console

import estimate_fit
from apple_launches import PUBLISHED
from estimate_launches import LAUNCHES
from mlx_anvil.mslc.estimation import ratio, typical_error


@click.command()
@click.option("--only", default="", help="Part of a launch's name; the others' counts stay as they are in the file.")
def main(only: str) -> None:
    console = Console(width=140)
    kept, timings = estimate_fit.read_timings()
    launches = {**LAUNCHES, **PUBLISHED}
    works = {}
    for name in dict.fromkeys(timing.work for timing in timings):
        if only in name or name not in kept:
            works[name] = launches[name]().work()
            console.print(f"{name}: {works[name].unexplained:.1%} of a count unexplained")
        else:
            works[name] = kept[name]
    parameters = estimate_fit.fit([timing for timing in timings if not timing.held], works)
    estimate_fit.write(parameters, works, timings)
    console.print(parameters)
    for held in (False, True):
        ratios = [ratio(timing, works, parameters) for timing in timings if timing.held == held]
        console.print(f"{'held out' if held else 'fitted'}: {len(ratios)}, typical error {typical_error(ratios):.1%}")


if __name__ == "__main__":
    main()
