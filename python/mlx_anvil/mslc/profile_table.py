"""Formats profiles as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from .profile import METRICS, SIMD_WIDTH, THREADGROUP, LaunchProfile

Column = tuple[str, LaunchProfile]


def metrics_table(columns: Sequence[Column], compare: bool = False) -> Table:
    """One column per profile. With `compare`, the last column is the ratio of the first profile to the second."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", overflow="fold")
    if compare:
        table.add_column("ratio", justify="right")
    values = [profile.metrics() for _, profile in columns]
    for name, (title, unit) in METRICS.items():
        row = [value[name] for value in values]
        if not any(row):
            continue  # all values are zero or missing
        cells = [_format(value, unit) for value in row]
        table.add_row(title, *cells, *([_quotient(row[0], row[1])] if compare else []))
    return table


def sites_table(profile: LaunchProfile, count: int) -> Table:
    """Lists the sites with the largest excess of transactions, then those with the most transactions."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("place", "memory", "access"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accesses", "bytes", "lines/cycles", "if packed", "lanes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for site in profile.sites[:count]:
        table.add_row(
            f"{Path(site.file).name}:{site.line}:{site.column}" if site.file else "?",
            site.memory if site.memory == THREADGROUP else f"{site.memory} {site.buffer}",
            site.kind,
            f"{site.accesses:,}",
            f"{site.bytes:,}",
            f"{site.transactions / site.accesses:.2f}",
            f"{site.ideal_transactions / site.accesses:.2f}",
            f"{site.lanes / site.accesses / SIMD_WIDTH:.0%}",
        )
    return table


def _format(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.2f}" if unit == "ratio" else f"{value:,}"


def _quotient(a: float | None, b: float | None) -> str:
    if a is None or b is None or (not a and not b):
        return "-"
    return f"{a / b:.2f}x" if b else "only here"
