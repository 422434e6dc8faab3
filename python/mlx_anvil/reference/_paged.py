"""Pages in the order of a table: the definition of ``block_table`` of flash_attention."""

import mlx.core as mx


def gather(cache: mx.array, block_table: mx.array | None) -> mx.array:
    """``[pages, heads, page_size, D]`` -> ``[batch, heads, pages_per_sequence * page_size, D]``. Ids are clamped."""
    if block_table is None:
        return cache
    _, heads, page_size, dim = cache.shape
    batch, columns = block_table.shape
    ids = mx.clip(block_table.astype(mx.int32), 0, cache.shape[0] - 1)
    pages = mx.take(cache, ids, axis=0)  # [batch, pages_per_sequence, heads, page_size, D]
    return pages.transpose(0, 2, 1, 3, 4).reshape(batch, heads, columns * page_size, dim)
