"""Draws the pictures of docs/design/flash_attention.md: ``python docs/figures.py`` (needs the ``plot`` extra)."""

from pathlib import Path

from mlx_anvil._extras import missing

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
except ModuleNotFoundError as error:
    raise missing(error, "plot") from None

IMAGES = Path(__file__).parent / "images"
KEPT, PASSING, WHOLE, EDGE, SKIPPED = "#a9cfe8", "#f3b37a", "#8fc7b0", "#f2c14e", "#ececec"


def box(axis: Axes, x: float, y: float, width: float, height: float, color: str, text: str = "") -> None:
    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=1.5))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#444444"))


def canvas(width: float, height: float, title: str) -> tuple[plt.Figure, Axes]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.set_title(title, fontsize=10)
    axis.set_axis_off()
    axis.set_aspect("equal")
    return figure, axis


def tiling() -> plt.Figure:
    """A block of queries stays; tiles of keys and values stream past."""
    figure, axis = canvas(7, 3.6, "Forward: a block of queries stays, tiles of keys and values stream past")
    for i in range(4):
        box(axis, 0, 3 - i, 2.4, 0.95, KEPT, f"q, SIMD group {i}")
    for j in range(4):
        shade = PASSING if j == 1 else SKIPPED
        box(axis, 3.4 + 1.6 * j, 4.6, 1.5, 0.9, shade, f"k, v tile {j}")
    for i in range(4):
        box(axis, 3.4 + 1.6, 3 - i, 1.5, 0.95, WHOLE, "S, P")
    for i in range(4):
        box(axis, 10.4, 3 - i, 2.2, 0.95, KEPT, "m, l, out")
    arrow(axis, (2.5, 2), (4.9, 2))
    arrow(axis, (5.75, 4.55), (5.75, 4.0))
    arrow(axis, (6.6, 2), (10.3, 2))
    axis.text(8.4, 2.25, "out = out 2^(m - m') + P v", ha="center", fontsize=9)
    axis.set_xlim(-0.2, 12.8)
    axis.set_ylim(-0.2, 5.8)
    return figure


def band(left: int = 40, queries: int = 128, keys: int = 160, rows: int = 16, columns: int = 16) -> plt.Figure:
    """Which tiles a causal window visits, and which of those it has to mask."""
    figure, axis = canvas(6.4, 5.2, f"Causal, window of {left + 1} keys: {queries} queries, {keys} keys")
    for first in range(0, queries, rows):
        for key in range(0, keys, columns):
            low, high = first + keys - queries - left, first + rows - 1 + keys - queries
            visited = key + columns > low and key <= high
            inside = key >= low + rows - 1 and key + columns - 1 <= high - rows + 1
            color = WHOLE if inside else EDGE if visited else SKIPPED
            axis.add_patch(Rectangle((key, queries - first - rows), columns, rows, facecolor=color, edgecolor="white"))
    for query in range(queries):
        position = query + keys - queries
        axis.plot([max(0, position - left), position + 1], [queries - query - 0.5] * 2, color="#444444", linewidth=0.4)
    axis.set_xlim(0, keys)
    axis.set_ylim(0, queries)
    handles = [Patch(color=WHOLE), Patch(color=EDGE), Patch(color=SKIPPED)]
    labels = ["visited, no masking", "visited, masked", "never visited"]
    figure.legend(handles, labels, ncols=3, loc="outside lower center", frameon=False, fontsize=9)
    return figure


def backward() -> plt.Figure:
    """The two passes of the gradients."""
    figure, axis = canvas(8.6, 3.8, "Backward: each pass keeps the rows whose gradient it accumulates")
    for x, title, kept, passing, result, products in (
        (0, "dQ pass", "q, dO, lse, delta", "k, v", "dQ", "S = q kᵀ    dP = dO vᵀ    dQ += dS k"),
        (
            8,
            "dK/dV pass, every head of the group",
            "k, v",
            "q, dO, lse, delta",
            "dK, dV",
            "Sᵀ = k qᵀ    dPᵀ = v dOᵀ    dV += Pᵀ dO    dK += dSᵀ q",
        ),
    ):
        axis.text(x + 3.5, 4.5, title, ha="center", fontsize=10)
        box(axis, x, 1, 2.5, 2.4, KEPT, f"kept:\n{kept}")
        for i in range(3):
            box(axis, x + 2.8 + 0.2 * i, 2.9 - 0.35 * i, 2.4, 1.0, PASSING, f"streamed:\n{passing}" if i == 2 else "")
        box(axis, x + 5.7, 1, 1.5, 2.4, KEPT, result)
        arrow(axis, (x + 2.5, 1.6), (x + 5.6, 1.6))
        axis.text(x + 3.5, 0.3, products, ha="center", fontsize=8)
    axis.set_xlim(-0.3, 15.6)
    axis.set_ylim(0, 5)
    return figure


def main() -> None:
    """Writes every picture."""
    IMAGES.mkdir(exist_ok=True)
    for draw in (tiling, band, backward):
        figure = draw()
        figure.savefig(IMAGES / f"attention_{draw.__name__}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
