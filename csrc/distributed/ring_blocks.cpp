#include "distributed/ring_blocks.h"

#include <algorithm>
#include <cstring>

namespace mlx_anvil {

namespace {

AttentionView packed_view(void* data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, {heads * rows * columns, rows * columns, columns, 1}};
}

void pack(const AttentionView& from,
          const AttentionSizes& sizes,
          int64_t columns,
          const std::vector<Segment>& segments,
          int64_t item_bytes,
          char* to) {
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t h = 0; h < sizes.kv_heads; ++h) {
      for (const Segment& segment : segments) {
        for (int64_t r = segment.first; r < segment.first + segment.length; ++r) {
          const char* row =
              static_cast<const char*>(from.data) +
              (b * from.strides[0] + h * from.strides[1] + r * from.strides[2]) * item_bytes;
          if (from.strides[3] == 1) {
            std::memcpy(to, row, columns * item_bytes);
          } else {
            for (int64_t c = 0; c < columns; ++c) {
              std::memcpy(to + c * item_bytes, row + c * from.strides[3] * item_bytes, item_bytes);
            }
          }
          to += columns * item_bytes;
        }
      }
    }
  }
}

}  // namespace

int64_t piece_bytes(const AttentionSizes& sizes, int64_t rows, int64_t item_bytes) {
  return sizes.batch * sizes.kv_heads * rows * (sizes.head_dim + sizes.v_head_dim) * item_bytes;
}

PieceViews packed_views(const AttentionSizes& sizes, int64_t rows, void* data, int64_t item_bytes) {
  const int64_t heads = sizes.kv_heads;
  char* const v =
      static_cast<char*>(data) + sizes.batch * heads * rows * sizes.head_dim * item_bytes;
  return {packed_view(data, heads, rows, sizes.head_dim),
          packed_view(v, heads, rows, sizes.v_head_dim)};
}

void pack_piece(const AttentionOperands& args,
                const std::vector<Segment>& segments,
                int64_t item_bytes,
                void* to) {
  int64_t rows = 0;
  for (const Segment& segment : segments) {
    rows += segment.length;
  }
  const PieceViews packed = packed_views(args.sizes, rows, to, item_bytes);
  const AttentionSizes& sizes = args.sizes;
  pack(args.k, sizes, sizes.head_dim, segments, item_bytes,
       static_cast<char*>(const_cast<void*>(packed.k.data)));
  pack(args.v, sizes, sizes.v_head_dim, segments, item_bytes,
       static_cast<char*>(const_cast<void*>(packed.v.data)));
}

AttentionView moved(const AttentionView& view, int64_t batch, int64_t first, int64_t item_bytes) {
  AttentionView own = view;
  own.data = static_cast<const char*>(view.data) +
             (batch * view.strides[0] + first * view.strides[2]) * item_bytes;
  return own;
}

namespace {

bool sees_all(const Block& block) {
  return block.config.window_left == kUnboundedWindow &&
         block.config.window_right == kUnboundedWindow;
}

// Adds a block. One that goes on where the last one ends is made one with it: the fewer keys a call
// has, the more its results cost to join.
void add(std::vector<Block>& blocks, const Block& block) {
  Block* const last = blocks.empty() ? nullptr : &blocks.back();
  if (last && last->batch == block.batch && last->query == block.query &&
      last->key + last->keys == block.key && sees_all(*last) && sees_all(block)) {
    last->keys += block.keys;
  } else {
    blocks.push_back(block);
  }
}

}  // namespace

std::vector<Block> blocks_of(const RingPlan& plan,
                             const AttentionOperands& args,
                             const int32_t* lengths,
                             int source,
                             int piece) {
  std::vector<Block> blocks;
  const int64_t calls = lengths ? args.sizes.batch : 1;
  for (int64_t b = 0; b < calls; ++b) {
    const auto in_use = [&](const Segment& segment) {
      return lengths ? std::clamp<int64_t>(lengths[b] - segment.position, 0, segment.length)
                     : segment.length;
    };
    for (const Segment& rows : plan.rows(plan.rank())) {
      int64_t key = 0;
      for (const Segment& of_piece : plan.piece(source, piece)) {
        const Segment queries = {rows.first, rows.position, in_use(rows)};
        const Segment keys = {key, of_piece.position, in_use(of_piece)};
        key += of_piece.length;
        if (plan.sees(queries, keys)) {
          add(blocks, {b, lengths ? 1 : args.sizes.batch, queries.first, queries.length, keys.first,
                       keys.length,
                       config_of_block(args.config, queries.position, queries.length, keys.position,
                                       keys.length)});
        }
      }
    }
  }
  return blocks;
}

}  // namespace mlx_anvil
