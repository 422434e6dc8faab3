"""The report as Markdown: a table of contents with results, then each section, with long tables folded."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from mlx_anvil._cli import bytes_text, time_text
from mlx_anvil.report.section import Section

_SIGNS = {
    "ok": "ok",
    "findings": "**findings**",
    "skipped": "skipped",
    "failed": "**failed**",
    "running": "**did not finish**",
    "not run": "not run",
}
Rows = list[dict[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Cells may contain any text."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _fenced(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````"


def _system(data: dict[str, Any]) -> list[str]:
    info = data["info"]
    rows = [(name.replace("_", " "), info[name]) for name in ("version", "mlx", "built_for_mlx", "python", "platform")]
    rows += [("processor", info["processor"]), ("memory", bytes_text(data["memory_bytes"]))]
    rows += [(f"GPU: {name.replace('_', ' ')}", value) for name, value in data["gpu"].items()]
    rows += [(name.replace("_", " "), value) for name, value in data["tools"].items()]
    rows += [(f"`{name}`", value) for name, value in data["environment"].items()]
    backends = table(
        ("backend", "built", "usable", "detail"),
        (
            (name, *("yes" if b[key] else "no" for key in ("built", "usable")), b["detail"])
            for name, b in info["backends"].items()
        ),
    )
    note = [f"> {data['virtual_gpu']}"] if data["virtual_gpu"] else []
    return [*note, table(("fact", "value"), rows), backends]


def _compiler(data: dict[str, Any]) -> list[str]:
    rows: Rows = data["rows"]
    files, standards = (list(dict.fromkeys(row[key] for row in rows)) for key in ("file", "standard"))
    cells = {(row["file"], row["standard"]): _compiled(row) for row in rows}
    grid = table(("file", *standards), ([f"`{f}`", *(cells[f, s] for s in standards)] for f in files))
    said = [
        _folded(f"{row['file']}, {row['standard']}: {_compiled(row)}", _fenced(row["diagnostics"]))
        for row in rows
        if row["diagnostics"].strip()
    ]
    return [f"Compiler: {', '.join(data['compiler'])}", grid, *said]


def _compiled(row: dict[str, Any]) -> str:
    if row["result"] in ("ok", "error"):
        counts = [f"{row[kind]} {kind}" for kind in ("errors", "warnings") if row[kind]]
        return f"{', '.join(counts) or row['result']} ({time_text(row['seconds'])})"
    return str(row["result"])


def _pipelines(data: dict[str, Any]) -> list[str]:
    rows: Rows = data["rows"]
    groups = []
    for op, of_op in _grouped(rows, lambda row: row["op"]):
        seconds = [row["seconds"] for row in of_op]
        threads = [row["facts"]["max_threads_per_threadgroup"] for row in of_op if row["facts"]]
        memory = [row["facts"].get("static_threadgroup_memory", 0) for row in of_op if row["facts"]]
        groups.append(
            (
                op,
                len(of_op),
                sum(bool(row["error"]) for row in of_op),
                time_text(median(seconds)),
                time_text(max(seconds)),
                min(threads, default="-"),
                max(memory, default="-"),
            )
        )
    head = ("op", "kernels", "failed", "median", "slowest", "least max. threads", "most static memory, bytes")
    names = list(dict.fromkeys(name for row in rows for name in row["facts"]))
    every = table(
        ("kernel", "time", *(name.replace("_", " ") for name in names)),
        (
            (f"`{row['kernel']}`", time_text(row["seconds"]), *(row["facts"].get(name, "-") for name in names))
            for row in rows
        ),
    )
    errors = [_folded(f"{row['kernel']}: error", _fenced(row["error"])) for row in rows if row["error"]]
    return [table(head, groups), *errors, _folded("Every pipeline", every)]


def _ops(data: dict[str, Any]) -> list[str]:
    rows: Rows = data["rows"]
    groups = []
    for (op, variant), of_op in _grouped(rows, lambda row: (row["op"], row["variant"])):
        shares = [row["error"] / row["limit"] for row in of_op if "error" in row and row["limit"]]
        ratios = [row["speedup"] for row in of_op if "speedup" in row]
        groups.append(
            (
                f"{op} {variant}",
                len(of_op),
                sum(not row["passed"] for row in of_op),
                f"{max(shares):.2f}" if shares else "-",
                f"{median(ratios):.2f}x" if ratios else "-",
            )
        )
    head = ("op", "cases", "failed", "worst error / limit", "median speed-up")
    parts = [table(head, groups)]
    wrong = [row for row in rows if not row["passed"]]
    if wrong:
        columns = ("op", "variant", "what", "dtype", "shape", "error", "limit", "exception")
        parts.append("Above their limits:\n\n" + table(columns, ([row.get(c, "-") for c in columns] for row in wrong)))
    timed = [row for row in rows if "speedup" in row]
    if timed:
        lines = [_times(row) for row in timed]
        every = table(("op", "", "dtype", "shape", "ours", "MLX", "speed-up"), lines)
        parts.append(_folded("Times", every))
    return parts


def _times(row: dict[str, Any]) -> list[str]:
    shape = "x".join(map(str, row["shape"]))
    times = [time_text(row[key]) for key in ("ours", "mlx")]
    return [f"{row['op']} {row['variant']}", row["what"], row["dtype"], shape, *times, f"{row['speedup']:.2f}x"]


def _grouped(rows: Rows, key: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, Rows]]:
    groups: dict[Any, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


_BODIES = {"system": _system, "compiler": _compiler, "pipelines": _pipelines, "ops": _ops}


def _body(section: Section) -> list[str]:
    if section.status == "failed":
        return [_fenced(section.data["traceback"])]
    if not section.data:
        return [section.summary or "No results."]
    return _BODIES[section.name.partition("/")[0]](section.data)


def document(sections: Sequence[Section], heading: str) -> str:
    """The whole report."""
    head = table(
        ("section", "", "result", "time"),
        ((s.title, _SIGNS[s.status], s.summary, time_text(s.seconds) if s.seconds else "") for s in sections),
    )
    parts = [f"# mlx-anvil hardware report\n\n{heading}", head]
    for section in sections:
        parts += [f"## {section.title}", *_body(section)]
    return "\n\n".join(parts) + "\n"
