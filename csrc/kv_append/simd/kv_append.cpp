// Affine quantization of a row on the CPU, with the bits of MLX's own CPU kernel: the same float32
// operations in the same order.
//
//   for each group of columns:
//     scale = (max - min) / (2^bits - 1), signed so that the edge of larger magnitude is exact
//     code = round((x - bias) / scale), half to even
#include "common/simd/simd.h"
#include "kv_append/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

constexpr int kMostColumns = 128;  // of a group

struct GroupScale {
  float scale, bias;
};

GroupScale scale_of(const float* x, int group, int bits) {
  f32v low = load_lanes(x), high = low;
  for (int i = kLanes; i < group; i += kLanes) {
    const f32v next = load_lanes(x + i);
    low = next < low ? next : low;
    high = high < next ? next : high;
  }
  float least = low[0], most = high[0];
  for (int i = 1; i < kLanes; ++i) {
    least = low[i] < least ? low[i] : least;
    most = most < high[i] ? high[i] : most;
  }
  const float step = (most - least) / static_cast<float>((1 << bits) - 1);
  const float positive = step < 1e-7f ? 1e-7f : step;
  const bool is_low = __builtin_fabsf(least) > __builtin_fabsf(most);
  const float scale = is_low ? positive : -positive, edge = is_low ? least : most;
  const float code = __builtin_rintf(edge / scale);
  return code == 0.0f ? GroupScale{scale, 0.0f} : GroupScale{edge / code, edge};
}

template <class T>
inline void store_number(void* to, int64_t at, float x) {
  T lanes[kLanes];
  store_lanes(lanes, splat(x));
  std::memcpy(static_cast<T*>(to) + at, lanes, sizeof(T));
}

// Codes follow each other without gaps, from the lowest bit on: 8 of them fill `kBits` bytes.
template <int kBits>
inline void pack_codes(const int32_t* codes, int count, uint8_t* to) {
  for (int i = 0; i < count; i += 8, to += kBits) {
    uint64_t bits = 0;
    for (int j = 0; j < 8; ++j) {
      bits |= static_cast<uint64_t>(codes[i + j]) << (j * kBits);
    }
    std::memcpy(to, &bits, kBits);
  }
}

template <class T, int kBits>
void quantize_row(const QuantizeRow& row) {
  constexpr float kRound = 0x1.8p23f;  // the adder rounds numbers of 22 bits to integers
  const T* x = static_cast<const T*>(row.x);
  uint8_t* w = row.w;
  float numbers[kMostColumns];
  int32_t codes[kMostColumns];
  for (int64_t group = 0; group < row.columns / row.group; ++group) {
    for (int i = 0; i < row.group; i += kLanes) {
      store_lanes(numbers + i, load_lanes(x + i));
    }
    const auto [scale, bias] = scale_of(numbers, row.group, kBits);
    for (int i = 0; i < row.group; i += kLanes) {
      const f32v code = (load_lanes(numbers + i) - bias) / scale;
      // NaN becomes 0: a conversion of it to an integer could be anything.
      const f32v inside = at_most(code > splat(0.0f) ? code : splat(0.0f), (1 << kBits) - 1);
      const i32v rounded = bits_as<i32v>(inside + kRound) - bits_as<int32_t>(kRound);
      std::memcpy(codes + i, &rounded, sizeof(rounded));
    }
    pack_codes<kBits>(codes, row.group, w);
    store_number<T>(row.scales, group, scale);
    store_number<T>(row.biases, group, bias);
    x += row.group;
    w += row.group * kBits / 8;
  }
}

template <class T>
void quantize_row_of(const QuantizeRow& row) {
  switch (row.bits) {
    case 2:
      return quantize_row<T, 2>(row);
    case 3:
      return quantize_row<T, 3>(row);
    case 4:
      return quantize_row<T, 4>(row);
    case 5:
      return quantize_row<T, 5>(row);
    case 6:
      return quantize_row<T, 6>(row);
    default:
      return quantize_row<T, 8>(row);
  }
}

}  // namespace

constinit const KvAppendKernels kv_append_kernels_table = {
    .quantize_float32 = quantize_row_of<float>,
    .quantize_float16 = quantize_row_of<f16>,
    .quantize_bfloat16 = quantize_row_of<bf16>,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
