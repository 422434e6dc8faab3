// Blocks of GGUF as float32, in the order of their columns. For kernel files only. Each number is
// rounded as in the gguf package: products of a scale and a code are exact for all formats but
// q6_k, so that a fused multiply-add changes nothing.
#pragma once

#include "common/simd/simd.h"
#include "gguf_matmul/problem.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

inline float gguf_half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return widen(f16{}, u16v{} + bits)[0];
}

struct GgufScale {
  int scale, min;
};

// Scale and min `j` of q4_k and q5_k; `s` are their 12 bytes.
inline GgufScale gguf_scale(const uint8_t* s, int j) {
  return j < 4 ? GgufScale{s[j] & 63, s[j + 4] & 63}
               : GgufScale{(s[j + 4] & 15) | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4};
}

// Scale `j` of iq4_xs, relative to its offset.
inline int gguf_iq4_scale(const uint8_t* block, int j) {
  const int high = block[2] | block[3] << 8;
  return ((block[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32;
}

// Codes of 32 columns: the low halves of 16 bytes, then the high halves.
template <class Value>
inline void gguf_halves(const uint8_t* q, float scale, Value value, float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * value(q[i] & 15);
    out[i + 16] = scale * value(q[i] >> 4);
  }
}

inline void gguf_with_minima(const uint8_t* block,
                             const uint8_t* q,
                             const uint8_t* high,
                             float* out) {
  const float d = gguf_half(block), dmin = gguf_half(block + 2);
  for (int j = 0; j < 8; ++j) {
    const GgufScale own = gguf_scale(block + 4, j);
    const float scale = d * static_cast<float>(own.scale);
    const float min = dmin * static_cast<float>(own.min);
    for (int i = 0; i < 32; ++i) {
      int code = q[j / 2 * 32 + i] >> 4 * (j % 2) & 15;
      if (high) {
        code |= (high[i] >> j & 1) << 4;
      }
      out[32 * j + i] = scale * static_cast<float>(code) - min;
    }
  }
}

inline void gguf_q6k(const uint8_t* block, float* out) {
  const float d = gguf_half(block + 208);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + j]));
    const int half = j / 8, quarter = j / 2 % 4;
    const uint8_t* const low = block + 64 * half + 32 * (quarter % 2) + 16 * (j % 2);
    const uint8_t* const high = block + 128 + 32 * half + 16 * (j % 2);
    for (int i = 0; i < 16; ++i) {
      const int code = (low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4;
      out[16 * j + i] = scale * static_cast<float>(code - 32);
    }
  }
}

// Dequantises one block.
inline void gguf_dequantize(GgufKind kind, const uint8_t* block, float* out) {
  const auto minus_8 = [](int code) { return static_cast<float>(code - 8); };
  const auto iq4 = [](int code) { return static_cast<float>(kIq4Values[code]); };
  switch (kind) {
    case GgufKind::kQ4_0:
      return gguf_halves(block + 2, gguf_half(block), minus_8, out);
    case GgufKind::kQ8_0: {
      const float d = gguf_half(block);
      for (int i = 0; i < 32; ++i) {
        out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
      }
      return;
    }
    case GgufKind::kQ4K:
      return gguf_with_minima(block, block + 16, nullptr, out);
    case GgufKind::kQ5K:
      return gguf_with_minima(block, block + 48, block + 16, out);
    case GgufKind::kQ6K:
      return gguf_q6k(block, out);
    case GgufKind::kIq4Nl:
      return gguf_halves(block + 2, gguf_half(block), iq4, out);
    case GgufKind::kIq4Xs:
      for (int j = 0; j < 8; ++j) {
        const float scale = gguf_half(block) * static_cast<float>(gguf_iq4_scale(block, j));
        gguf_halves(block + 8 + 16 * j, scale, iq4, out + 32 * j);
      }
      return;
  }
}

// Dequantises columns [first, first + count) of a row, whole blocks.
inline void gguf_dequantize(
    GgufKind kind, const uint8_t* row, int64_t first, int64_t count, float* out) {
  const int64_t columns = gguf_block_columns(kind), bytes = gguf_block_bytes(kind);
  const uint8_t* block = row + first / columns * bytes;
  for (int64_t column = 0; column < count; column += columns, block += bytes) {
    gguf_dequantize(kind, block, out + column);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
