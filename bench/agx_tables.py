"""The tables of agx.json, for docs/apple-kernels.md."""

from collections.abc import Iterator

from op_tables import Results, markdown

DTYPE = "float16"


def compared(results: Results) -> Iterator[Results]:
    """The rows with a kernel of MLX's, of one dtype: attention, decode, products."""
    rows = [row for row in results["rows"] if row.get("dtype") == DTYPE]
    yield from sorted(rows, key=lambda row: (row["op"], len(row["what"]), row["what"]))


def needs_by_op(results: Results) -> str:
    """All specialisations of an op: the most and the least that one needs, and how many spill."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in results["rows"]):
        found = [row["ours"] for row in results["rows"] if row["op"] == op]
        registers, threads = ([needs[name] for needs in found] for name in ("registers", "threads"))
        spilling = sum(needs["spills"] > 0 for needs in found)
        ranges = [f"{min(x)} to {max(x)}" if min(x) < max(x) else f"{min(x)}" for x in (registers, threads)]
        lines.append([f"`{op}`", str(len(found)), *ranges, str(spilling) if spilling else "none"])
    return markdown(("op", "specialisations", "registers", "threads", "that spill"), lines)
