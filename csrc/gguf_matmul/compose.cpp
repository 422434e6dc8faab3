#include "gguf_matmul/compose.h"

#include <utility>
#include <vector>

namespace mlx_anvil {

namespace {

// The blocks of a matrix as integers, [..., blocks, bytes of a block], and what is read from them.
// Divides by powers of two instead of shifting: a nested vmap of MLX's shifts is wrong
// (docs/mlx-bugs.md).
class Blocks {
 public:
  Blocks(GgufKind kind, const mx::array& w, mx::Stream s)
      : bytes_(mx::unflatten(w, -1, {-1, gguf_block_bytes(kind)}, s)), s_(s) {}

  mx::array bytes(int first, int count) const {
    mx::Shape start(bytes_.ndim(), 0), stop = bytes_.shape();
    start.back() = first;
    stop.back() = first + count;
    return mx::slice(bytes_, start, stop, s_);
  }
  mx::array integers(int first, int count) const {
    return mx::astype(bytes(first, count), mx::int32, s_);
  }
  mx::array signed_bytes(int first, int count) const {
    return mx::astype(mx::view(bytes(first, count), mx::int8, s_), mx::float32, s_);
  }
  // float16 at a byte of each block, [..., blocks, 1]
  mx::array half(int at) const {
    const mx::array own = mx::contiguous(bytes(at, 2), false, s_);
    return mx::astype(mx::view(own, mx::float16, s_), mx::float32, s_);
  }
  // `bits` bits of integers, from bit `bit` on
  mx::array field(const mx::array& x, int bit, int bits) const {
    return mx::remainder(mx::floor_divide(x, mx::array(1 << bit), s_), mx::array(1 << bits), s_);
  }
  // The low halves of each `run` bytes, then their high halves.
  mx::array halves(const mx::array& x, int run) const {
    const mx::array runs = mx::unflatten(x, -1, {-1, run}, s_);
    return mx::flatten(mx::concatenate({field(runs, 0, 4), field(runs, 4, 4)}, -1, s_), -2, -1, s_);
  }
  mx::array join(std::vector<mx::array> parts) const {
    return mx::concatenate(std::move(parts), -1, s_);
  }
  mx::array floats(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }
  mx::array plus(const mx::array& x, float number) const {
    return mx::add(x, mx::array(number), s_);
  }
  mx::array times(const mx::array& x, const mx::array& y) const { return mx::multiply(x, y, s_); }
  mx::array sum(const mx::array& x, const mx::array& y) const { return mx::add(x, y, s_); }

  // factors [..., blocks, groups] times codes [..., blocks, columns]
  mx::array scaled(const mx::array& factors, const mx::array& codes) const {
    return mx::multiply(mx::expand_dims(factors, -1, s_), grouped(factors, codes), s_);
  }
  mx::array grouped(const mx::array& factors, const mx::array& codes) const {
    return mx::unflatten(codes, -1, {factors.shape(-1), -1}, s_);
  }
  // [..., blocks, groups, columns] to [..., K]
  mx::array rows(const mx::array& x) const { return mx::flatten(x, -3, -1, s_); }

  mx::array iq4_values(const mx::array& codes) const {
    static const std::vector<float> values(std::begin(kIq4Values), std::end(kIq4Values));
    return mx::take(mx::array(values.begin(), {16}, mx::float32), codes, s_);
  }

 private:
  const mx::array bytes_;
  const mx::Stream s_;
};

// The 6-bit scales and minima of q4_k and q5_k.
std::pair<mx::array, mx::array> scales_and_mins(const Blocks& w) {
  const mx::array a = w.integers(4, 4), b = w.integers(8, 4), c = w.integers(12, 4);
  const auto with_top = [&](const mx::array& low, const mx::array& top) {
    return w.sum(low, w.times(w.field(top, 6, 2), mx::array(16)));
  };
  return {w.floats(w.join({w.field(a, 0, 6), with_top(w.field(c, 0, 4), a)})),
          w.floats(w.join({w.field(b, 0, 6), with_top(w.field(c, 4, 4), b)}))};
}

mx::array with_minima(const Blocks& w, const mx::array& codes, mx::Stream s) {
  const auto [scales, mins] = scales_and_mins(w);
  const mx::array products = w.scaled(w.times(w.half(0), scales), w.floats(codes));
  const mx::array minima = mx::expand_dims(w.times(w.half(2), mins), -1, s);
  return w.rows(mx::subtract(products, minima, s));
}

mx::array q5k(const Blocks& w, mx::Stream s) {
  std::vector<mx::array> high;
  const mx::array h = w.integers(16, 32);
  for (int bit = 0; bit < 8; ++bit) {
    high.push_back(w.field(h, bit, 1));
  }
  const mx::array top = w.times(w.join(std::move(high)), mx::array(16));
  return with_minima(w, mx::add(w.halves(w.integers(48, 128), 32), top, s), s);
}

mx::array q6k(const Blocks& w, mx::Stream s) {
  std::vector<mx::array> high;
  for (int half = 0; half < 2; ++half) {
    const mx::array h = w.integers(128 + 32 * half, 32);
    for (int bit = 0; bit < 8; bit += 2) {
      high.push_back(w.field(h, bit, 2));
    }
  }
  const mx::array top = w.times(w.join(std::move(high)), mx::array(16));
  const mx::array codes = mx::add(w.halves(w.integers(0, 128), 64), top, s);
  const mx::array scales = w.times(w.half(208), w.signed_bytes(192, 16));
  return w.rows(w.scaled(scales, w.plus(w.floats(codes), -32)));
}

mx::array iq4_xs(const Blocks& w, mx::Stream s) {
  const mx::array low = w.integers(4, 4), h = w.integers(2, 2);
  const auto stacked = [&](std::vector<mx::array> parts) {
    return mx::flatten(mx::stack(std::move(parts), -1, s), -2, -1, s);
  };
  const mx::array nibbles = stacked({w.field(low, 0, 4), w.field(low, 4, 4)});
  const mx::array tops =
      stacked({w.field(h, 0, 2), w.field(h, 2, 2), w.field(h, 4, 2), w.field(h, 6, 2)});
  const mx::array scales = w.floats(mx::add(nibbles, w.times(tops, mx::array(16)), s));
  return w.rows(w.scaled(w.times(w.half(0), w.plus(scales, -32)),
                         w.iq4_values(w.halves(w.integers(8, 128), 16))));
}

}  // namespace

mx::array compose_gguf_dequantized(GgufKind kind, const mx::array& w, mx::Stream s) {
  const Blocks blocks(kind, w, s);
  const auto short_codes = [&] { return blocks.halves(blocks.integers(2, 16), 16); };
  switch (kind) {
    case GgufKind::kQ4_0:
      return blocks.rows(
          blocks.scaled(blocks.half(0), blocks.plus(blocks.floats(short_codes()), -8)));
    case GgufKind::kQ8_0:
      return blocks.rows(blocks.scaled(blocks.half(0), blocks.signed_bytes(2, 32)));
    case GgufKind::kQ4K:
      return with_minima(blocks, blocks.halves(blocks.integers(16, 128), 32), s);
    case GgufKind::kQ5K:
      return q5k(blocks, s);
    case GgufKind::kQ6K:
      return q6k(blocks, s);
    case GgufKind::kIq4Nl:
      return blocks.rows(blocks.scaled(blocks.half(0), blocks.iq4_values(short_codes())));
    default:
      return iq4_xs(blocks, s);
  }
}

mx::array compose_gguf_matmul(
    GgufKind kind, QuantizedProduct product, const mx::array& x, const mx::array& w, mx::Stream s) {
  mx::array matrix = compose_gguf_dequantized(kind, w, s);
  if (product == QuantizedProduct::kTransposed) {
    matrix = mx::swapaxes(matrix, -1, -2, s);
  }
  return mx::astype(mx::matmul(mx::astype(x, mx::float32, s), matrix, s), x.dtype(), s);
}

}  // namespace mlx_anvil
