#include "gather_matmul/cpu_pieces.h"

#include <algorithm>
#include <cstring>

namespace mlx_anvil {

// A counting sort, which is stable.
GatherRows::GatherRows(const GatherSizes& sizes, const GatherIds& ids)
    : rows(static_cast<size_t>(sizes.pairs * sizes.rows)) {
  std::vector<int64_t> next(static_cast<size_t>(sizes.experts) + 1);
  std::vector<int32_t> expert_of(static_cast<size_t>(sizes.pairs));
  for (int64_t pair = 0; pair < sizes.pairs; ++pair) {
    expert_of[pair] = static_cast<int32_t>(gather_expert(sizes, ids, pair));
    next[expert_of[pair] + 1] += sizes.rows;
  }
  for (int64_t expert = 0; expert < sizes.experts; ++expert) {
    if (next[expert + 1] > 0) {
      experts.push_back({expert, next[expert], next[expert + 1]});
    }
    next[expert + 1] += next[expert];
  }
  for (int64_t pair = 0; pair < sizes.pairs; ++pair) {
    const int64_t left = gather_left(sizes, ids, pair);
    for (int64_t row = 0; row < sizes.rows; ++row) {
      rows[next[expert_of[pair]]++] = {left * sizes.rows + row, pair * sizes.rows + row};
    }
  }
}

std::vector<GatherPiece> GatherRows::pieces(int64_t most) const {
  std::vector<GatherPiece> all;
  for (const GatherPiece& expert : experts) {
    const int64_t parts = (expert.count + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = expert.count * part / parts, end = expert.count * (part + 1) / parts;
      all.push_back({expert.expert, expert.begin + begin, end - begin});
    }
  }
  return all;
}

bool GatherRows::same_x(const GatherPiece& a, const GatherPiece& b) const {
  return a.count == b.count &&
         std::equal(rows.begin() + a.begin, rows.begin() + a.begin + a.count,
                    rows.begin() + b.begin,
                    [](const GatherRow& p, const GatherRow& q) { return p.x == q.x; });
}

bool GatherRows::is_run(const GatherPiece& piece) const {
  for (int64_t i = 1; i < piece.count; ++i) {
    if (rows[piece.begin + i].out != rows[piece.begin].out + i) {
      return false;
    }
  }
  return true;
}

void GatherRows::copy_x(const GatherPiece& piece,
                        const void* x,
                        int64_t row_bytes,
                        void* to) const {
  for (int64_t i = 0; i < piece.count; ++i) {
    std::memcpy(static_cast<char*>(to) + i * row_bytes,
                static_cast<const char*>(x) + rows[piece.begin + i].x * row_bytes, row_bytes);
  }
}

}  // namespace mlx_anvil
