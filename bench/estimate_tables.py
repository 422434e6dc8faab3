"""The tables of docs/estimates.md: how wrong the model is, by the published times that it is validated with."""

from collections.abc import Iterable
from math import exp, log

from mlx_anvil.mslc.estimation import Timing, chip_error, chips, ratio, typical_error, validation
from op_tables import Results, markdown


def errors(_: Results) -> str:
    """The errors of every chip."""
    lines = []
    for name, numbers in chips().items():
        error, worst, count = chip_error(name)
        uncertain = [field for field, number in numbers.items() if "range" in number]
        words = {"ghz": "clock", "dram_gb_s": "memory bandwidth", "slc_mb": "system-level cache"}
        open_numbers = ", ".join(words[field] for field in uncertain)
        lines.append([name, str(count), f"{error:.0%}", f"{worst:.0%}", open_numbers or "none"])
    heads = ("chip", "published times", "typical error", "largest", "numbers with a range")
    return markdown(heads, lines)


def errors_by_kernel(_: Results) -> str:
    """The errors of every kind of kernel, of those that the fit used and of the others."""
    parameters, works, timings = validation()
    kinds: dict[str, list[Timing]] = {}
    for timing in timings:
        kinds.setdefault(timing.work.split()[0], []).append(timing)

    def of(chosen: Iterable[Timing]) -> list[str]:
        ratios = [ratio(timing, works, parameters) for timing in chosen]
        if not ratios:
            return ["0", ""]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        return [str(len(ratios)), f"{typical_error(ratios):.0%}, mean {mean:.2f}"]

    lines = []
    for kind, found in (*kinds.items(), ("all", list(timings))):
        used, held = ([t for t in found if t.held == flag] for flag in (False, True))
        lines.append([kind, *of(used), *of(held)])
    return markdown(("kernel", "fitted", "typical error, estimate / published", "held out", "the same"), lines)
