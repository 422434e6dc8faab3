// x W^T for many rows of x, in integers, on machines with VNNI. Superblocks of kPanelRows rows of w
// become bytes with an offset of 128, or signed bytes for AMX. The product is then that of
// quantized_matmul/simd/int_gemm.cpp for 8-bit codes, with groups of 16 or 32 columns.
//
//   for each panel of kPanelRows rows of w, superblock:
//     unpack codes and scales, and transpose them: a lane is a row of w; prefetch the next
//     for each tile of rows of x: totals += the superblock's product
//   store totals
#include "gguf_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "gguf_matmul/simd/int_blocks.h"
#include "quantized_matmul/simd/int_tiles.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

static_assert(kGgufGemmColumns == kPanelRows && kGgufSuperblock == kChunk);

constexpr int64_t kLineBytes = 64;
constexpr int64_t kMostGroups = kChunk / 16;

// Byte offset of each part.
struct Scratch {
  static constexpr int64_t kRows = 0;                               // [kPanelRows][kChunk]
  static constexpr int64_t kCodes = kRows + kPanelRows * kChunk;    // as in IntTile
  static constexpr int64_t kScales = kCodes + kPanelRows * kChunk;  // likewise
  static constexpr int64_t kTotals = kScales + kMostGroups * 2 * kPanelRows * 4;

  // Totals of whole tiles of rows of x.
  static int64_t bytes(int64_t x_rows) {
    return kTotals + round_up(x_rows, kMostTileRows) * kPanelRows * 4;
  }
};

template <class Format, class Tiles>
class Panel {
 public:
  Panel(const GgufView& matrix, int64_t first, int64_t count, char* scratch)
      : row_bytes_(matrix.row_bytes()),
        w_(matrix.w + first * row_bytes_),
        count_(count),
        rows_left_(matrix.outputs - first),
        rows_(reinterpret_cast<uint8_t*>(scratch + Scratch::kRows)),
        codes_(reinterpret_cast<uint8_t*>(scratch + Scratch::kCodes)),
        scales_(reinterpret_cast<float*>(scratch + Scratch::kScales)) {}

  const uint8_t* codes() const { return codes_; }
  const float* scales() const { return scales_; }

  void unpack(int64_t superblock) {
    for (int v = 0; v < kPanelVectors; ++v) {
      f32v scales[kLanes] = {};
      for (int i = 0; i < kLanes; ++i) {
        scales[i] = unpack_row(v * kLanes + i, superblock);
      }
      transpose(scales);
      for (int group = 0; group < kGroups; ++group) {
        float* const to = scales_ + group * 2 * kPanelRows + v * kLanes;
        store_lanes(to, scales[Format::kMins ? 2 * group : group]);
        if constexpr (Format::kMins) {
          store_lanes(to + kPanelRows, -scales[2 * group + 1]);
        }
      }
      for (int words = 0; words < kChunk / 4; words += kLanes) {
        u32v square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(&square[i], rows_ + (v * kLanes + i) * kChunk + words * 4, sizeof(u32v));
        }
        transpose(square);
        for (int i = 0; i < kLanes; ++i) {
          const int word = Format::word(words / kLanes, i);
          std::memcpy(codes_ + (word * kPanelVectors + v) * 64, &square[i], sizeof(u32v));
        }
      }
    }
  }

  // Prefetches part `part` of `parts` of the superblock that unpack() reads next: `superblock` of
  // the same rows, or with 0 the start of the next panel.
  [[gnu::always_inline]] void prefetch(int64_t superblock, int64_t part, int64_t parts) const {
    const int64_t row = superblock > 0 ? 0 : kPanelRows, first = superblock * kBytes;
    const int64_t left = row_bytes_ - first, bytes = left < kBytes ? left : kBytes;
    for (int64_t r = part; r < kPanelRows && row + r < rows_left_; r += parts) {
      const uint8_t* const from = w_ + (row + r) * row_bytes_ + first;
      for (int64_t byte = 0; byte < bytes; byte += kLineBytes) {
        __builtin_prefetch(from + byte, 0, 2);
      }
      __builtin_prefetch(from + bytes - 1, 0, 2);  // rows need not start at a cache line
    }
  }

 private:
  static constexpr int64_t kBytes = gguf_superblock_bytes(Format::kKind);
  static constexpr int kGroups = kChunk / Format::kGroup;

  f32v unpack_row(int row, int64_t superblock) {
    if (row >= count_) {
      std::memset(rows_ + row * kChunk, 0, kChunk);
      return f32v{};
    }
    const int64_t first = superblock * kBytes, left = row_bytes_ - first;
    const uint8_t* from = w_ + row * row_bytes_ + first;
    uint8_t padded[kBytes] = {};
    if (left < kBytes) {
      std::memcpy(padded, from, left);
      from = padded;
    }
    GgufCodes codes;
    const f32v scales = Format::load(from, codes);
    constexpr int kAdded = (Tiles::kSignedCodes ? 0 : 128) - Format::kOffset;
    const __m512i added = _mm512_set1_epi8(static_cast<char>(kAdded));
    for (int j = 0; j < kGgufVectors; ++j) {
      _mm512_storeu_si512(rows_ + row * kChunk + j * 64, _mm512_add_epi8(codes[j], added));
    }
    return scales;
  }

  const int64_t row_bytes_;
  const uint8_t* const w_;
  const int64_t count_, rows_left_;
  uint8_t* const rows_;
  uint8_t* const codes_;
  float* const scales_;
};

template <class Format, class Tiles>
void multiply_panel(const GgufGemmArgs& args, int64_t first, int64_t count) {
  const GgufView& matrix = args.matrix;
  char* const scratch = static_cast<char*>(args.scratch);
  float* const totals = reinterpret_cast<float*>(scratch + Scratch::kTotals);
  std::memset(totals, 0, round_up(args.x_rows, Tiles::kRows) * kPanelRows * sizeof(float));
  const GemmRows<Tiles> x(gguf_bytes_view(matrix, Format::kGroup), args.x_rows);
  Panel<Format, Tiles> panel(matrix, first, count, scratch);
  for (int64_t chunk = 0; chunk < x.chunks; ++chunk) {
    const int64_t left = matrix.columns - chunk * kChunk;
    const int64_t groups = (left < kChunk ? left : kChunk) / Format::kGroup;
    panel.unpack(chunk);
    const int64_t next = chunk + 1 < x.chunks ? chunk + 1 : 0;
    for (int64_t tile = 0; tile < x.tiles; ++tile) {
      panel.prefetch(next, tile, x.tiles);
      const int64_t row = tile * Tiles::kRows;
      const char* const packed = static_cast<const char*>(args.x) + x.at(chunk, tile);
      const IntTile<Tiles, Format::kMins> products = {packed,
                                                      x.factors(packed),
                                                      panel.codes(),
                                                      panel.scales(),
                                                      totals + row * kPanelRows,
                                                      groups,
                                                      1,
                                                      Format::kGroup / kRun};
      add_products(products, args.x_rows - row);
    }
  }
  with_elements(matrix.dtype, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(args.out) + first;
    for (int64_t m = 0; m < args.x_rows; ++m) {
      for (int64_t n = 0; n < count; n += kLanes) {
        store_columns(out + m * matrix.outputs, n, count, load_lanes(totals + m * kPanelRows + n));
      }
    }
  });
}

int group_of(GgufKind kind) {
  return kind == GgufKind::kQ6K ? 16 : 32;
}

}  // namespace

int64_t gguf_gemm_bytes(const GgufView& matrix, int64_t x_rows) {
  int64_t bytes = 0;
  const QuantizedMatrixView view = gguf_bytes_view(matrix, group_of(matrix.kind));
  with_tiles(view, [&](auto tiles) { bytes = GemmRows<decltype(tiles)>(view, x_rows).bytes(); });
  return bytes;
}

void gguf_gemm_pack(const GgufPackArgs& args) {
  const QuantizedMatrixView view = gguf_bytes_view(args.matrix, group_of(args.matrix.kind));
  with_tiles(view, [&](auto tiles) {
    pack_tiles<IntAffine<8>, decltype(tiles)>(
        {view, args.x, args.x_rows, args.first, args.count, args.to, args.finite});
  });
}

int64_t gguf_gemm_scratch(const GgufView&, int64_t x_rows) {
  return Scratch::bytes(x_rows);
}

void gguf_int_gemm(const GgufGemmArgs& args) {
  with_gguf_format(args.matrix.kind, [&](auto format) {
    using Format = decltype(format);
    with_tiles(gguf_bytes_view(args.matrix, Format::kGroup), [&](auto tiles) {
      using Tiles = decltype(tiles);
      const typename Tiles::Registers registers(Format::kGroup);
      for (int64_t n = 0; n < args.count; n += kPanelRows) {
        const int64_t left = args.count - n;
        multiply_panel<Format, Tiles>(args, args.first + n, left < kPanelRows ? left : kPanelRows);
      }
    });
  });
}

#else

int64_t gguf_gemm_bytes(const GgufView&, int64_t) {
  return 0;
}
void gguf_gemm_pack(const GgufPackArgs&) {}
int64_t gguf_gemm_scratch(const GgufView&, int64_t) {
  return 0;
}
void gguf_int_gemm(const GgufGemmArgs&) {}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
