"""Bytes of every process of a group, over any backend of MLX."""

import mlx.core as mx

_LENGTH_BYTES = 8


def gather_bytes(data: bytes, group: mx.distributed.Group) -> list[bytes]:
    """What each process gives, in the order of the ranks. Processes may give different lengths.

    All processes of the group call it, in the same order relative to their other communication.
    """
    lengths = [
        int.from_bytes(length, "little")
        for length in _gather_equal(len(data).to_bytes(_LENGTH_BYTES, "little"), _LENGTH_BYTES, group)
    ]
    longest = max(lengths)
    parts = _gather_equal(data, longest, group) if longest else [b""] * len(lengths)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _gather_equal(data: bytes, length: int, group: mx.distributed.Group) -> list[bytes]:
    """Gathers byte strings that are padded to ``length``."""
    own = mx.array(list(data.ljust(length, b"\0")), mx.uint8)
    gathered = bytes(memoryview(mx.distributed.all_gather(own, group=group)))  # type: ignore[arg-type]
    return [gathered[begin : begin + length] for begin in range(0, length * group.size(), length)]


def listed(ranks: list[int]) -> str:
    """``"rank 3"``, ``"ranks 0 and 2"``, ``"ranks 0, 1 and 3"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
