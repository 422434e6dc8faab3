#include "distributed/ring_plan.h"

#include <algorithm>

#include "common/integers.h"

namespace mlx_anvil {

namespace {

// With slices this long, joining results costs a few percent of the products.
constexpr int64_t kShortestSlice = 512;
// Few enough for a piece to be a small share of a part.
constexpr int64_t kMostPieces = 16;

// Slice `index` of `count` of a segment, of nearly equal length.
Segment slice(const Segment& segment, int64_t index, int64_t count) {
  const int64_t begin = segment.length * index / count;
  const int64_t end = segment.length * (index + 1) / count;
  return {segment.first + begin, segment.position + begin, end - begin};
}

}  // namespace

RingPlan::RingPlan(const RingLayout& layout,
                   int rank,
                   const AttentionConfig& config,
                   bool in_pieces)
    : layout_(layout), rank_(rank), left_(config.window_left), right_(config.window_right) {
  const int64_t shortest = kShortestSlice * (layout.zigzag ? 2 : 1);
  pieces_ = in_pieces ? std::clamp<int64_t>(layout.part / shortest, 1, kMostPieces) : 1;
}

std::vector<Segment> RingPlan::rows(int rank) const {
  if (!layout_.zigzag) {
    return {{0, rank * layout_.part, layout_.part}};
  }
  const int64_t chunk = layout_.part / 2;
  return {{0, rank * chunk, chunk}, {chunk, (2 * layout_.ranks - 1 - rank) * chunk, chunk}};
}

std::vector<Segment> RingPlan::piece(int rank, int piece) const {
  std::vector<Segment> segments;
  for (const Segment& segment : rows(rank)) {
    segments.push_back(slice(segment, piece, pieces_));
  }
  return segments;
}

int64_t RingPlan::piece_rows(int rank, int index) const {
  int64_t rows = 0;
  for (const Segment& segment : piece(rank, index)) {
    rows += segment.length;
  }
  return rows;
}

int64_t RingPlan::longest_piece() const {
  int64_t longest = 0;
  for (int i = 0; i < pieces(); ++i) {
    longest = std::max(longest, piece_rows(rank_, i));
  }
  return longest;
}

bool RingPlan::sees(const Segment& queries, const Segment& keys) const {
  if (queries.length == 0 || keys.length == 0) {
    return false;
  }
  const int64_t last_query = queries.position + queries.length - 1;
  const int64_t last_key = keys.position + keys.length - 1;
  return keys.position <= last_query + right_ && last_key >= queries.position - left_;
}

bool RingPlan::needs(int rank, int source, int index) const {
  for (const Segment& queries : rows(rank)) {
    for (const Segment& keys : piece(source, index)) {
      if (sees(queries, keys)) {
        return true;
      }
    }
  }
  return false;
}

int RingPlan::hops(int source, int index) const {
  for (int hops = layout_.ranks - 1; hops > 0; --hops) {
    if (needs((source + hops) % layout_.ranks, source, index)) {
      return hops;
    }
  }
  return 0;
}

AttentionConfig config_of_block(const AttentionConfig& config,
                                int64_t query_position,
                                int64_t queries,
                                int64_t key_position,
                                int64_t keys,
                                bool simplified) {
  AttentionConfig own = config;
  // Query i sees key j if i + ahead - left <= j <= i + ahead + right.
  const int64_t ahead = query_position - key_position;
  const int64_t aligned = keys - queries;  // where the kernels put query 0
  own.has_sinks = false;                   // they count once
  if (config.window_left < kUnboundedWindow) {
    const bool sees_first = simplified && queries - 1 + ahead - config.window_left <= 0;
    own.window_left = sees_first ? kUnboundedWindow : config.window_left - ahead + aligned;
  }
  if (config.window_right < kUnboundedWindow) {
    const bool sees_last = simplified && ahead + config.window_right >= keys - 1;
    own.window_right = sees_last ? kUnboundedWindow : config.window_right + ahead - aligned;
  }
  return own;
}

}  // namespace mlx_anvil
