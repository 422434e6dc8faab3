// Products of tiles of rows of x and panels of w as bytes, on machines with AMX: what VnniTiles
// (int_products.h) does on others. For kernel files only. Intel's manual, volume 1, chapter 18.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to 16x16 sums the products of 16
// rows of x and 16 rows of w, over a block of up to 64 elements. It takes about 16 cycles, whatever
// the size of the block.
//
//   w:  [run][word][vectors]                               codes relative to their offset, signed
//   x:  [block][piece][row of the tile][elements]          signed bytes
#pragma once

#include "quantized_matmul/simd/int_products.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// ---- registers ----------------------------------------------------------------------------------

// The compilers' intrinsics are macros, which take only literals, and GCC's do not say that they
// read memory.
template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline void tile_load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(row_bytes), "i"(kTile)
               : "memory");
}
template <int kTile>
inline void tile_store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}
// Adds the products of signed bytes.
template <int kSums, int kX, int kW>
inline void tile_add_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}

// ---- tiles --------------------------------------------------------------------------------------

template <int kPieces_>
struct AmxTiles {
  static constexpr int kPieces = kPieces_, kRows = kMostTileRows;
  static constexpr int64_t kMostBlock = 64;
  static constexpr bool kSignedCodes = true;

  // Sums start at 0.
  struct Start {
    void set(int64_t, int32_t, int32_t) {}
  };

  // Elements of a block, a power of two, given that `columns` are summed in integers.
  static int64_t block_of(int64_t columns) { return columns < kMostBlock ? columns : kMostBlock; }

  // This thread's tile registers, in use while the object exists: first sums, then a register of x
  // for each piece, then one of w. They are released because the system would save them in every
  // switch of threads.
  class Registers {
   public:
    explicit Registers(int64_t columns) {
      const int64_t block = block_of(columns);
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
      } config;
      for (int tile = 0; tile <= kW; ++tile) {
        const bool is_x = tile >= kX && tile < kW;
        config.row_bytes[tile] = static_cast<uint16_t>(is_x ? block : 64);
        config.rows[tile] = static_cast<uint8_t>(tile == kW ? block / 4 : kRows);
      }
      asm volatile("ldtilecfg %0" : : "m"(config));
    }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
    ~Registers() { asm volatile("tilerelease"); }
  };

  class Packer {
   public:
    // See RunBytes.
    template <class Element>
    Packer(int64_t columns, Element element) : block_(block_of(columns)), bytes_(element) {}

    // Packs run `run` of row m of a tile.
    void pack(i32v integers, char* tile, int64_t run, int64_t m) const {
      const __m512i bytes = bytes_.of(integers);
      const int64_t first = run * kRun, in_block = first & (block_ - 1);
      char* const to = tile + (first - in_block) * kRows * kPieces + m * block_ + in_block;
      unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + piece.value * kRows * block_),
                         _mm512_extracti32x4_epi32(bytes, piece.value));
      });
    }

   private:
    const int64_t block_;
    const RunBytes<kPieces, true> bytes_;
  };

  // Sums of a tile's rows and a vector of rows of w.
  using Sums = i32v[kPieces][kRows];

  // Starts products over `blocks` blocks of `block` elements, in the registers kAt and following.
  // Blocks of w are kVectors vectors apart.
  template <int kAt, int kVectors>
  MLX_ANVIL_UNROLLED static void multiply(const char* x,
                                          const uint8_t* w,
                                          int64_t blocks,
                                          int64_t block) {
    static_assert(kAt + kPieces <= kX);
    unroll<kPieces>([](auto piece) { tile_zero<kAt + piece.value>(); });
    for (int64_t i = 0; i < blocks; ++i) {
      tile_load<kW>(w, kVectors * 64);
      unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
        tile_load<kX + piece.value>(x + piece.value * kRows * block, block);
        tile_add_products<kAt + piece.value, kX + piece.value, kW>();
      });
      w += block / 4 * kVectors * 64;
      x += kPieces * kRows * block;
    }
  }

  // Stores what multiply() has started. A store waits for its products, and what comes after it
  // waits with it. So start other work in between.
  template <int kAt>
  MLX_ANVIL_UNROLLED static void store(Sums& sums) {
    unroll<kPieces>([&](auto piece) __attribute__((always_inline)) {
      tile_store<kAt + piece.value>(sums[piece.value], 64);
    });
  }

  // Combines the sums of all pieces, of row m of the tile.
  MLX_ANVIL_UNROLLED static f32v in_floats(const Sums& sums, int64_t m) {
    i32v of_row[kPieces][1];
    unroll<kPieces>([&](auto piece) { of_row[piece.value][0] = sums[piece.value][m]; });
    return MLX_ANVIL_ISA_NAMESPACE::in_floats<kPieces, 1>(of_row, 0);
  }

 private:
  static constexpr int kX = 4, kW = 7;  // the first registers of x and w
};

// Calls action(VnniTiles<pieces>()), or with AMX action(AmxTiles<pieces>()). `numbers` decides on
// the pieces: a matrix, or the dtype of x.
template <class Numbers, class Action>
inline void with_tiles(const Numbers& numbers, Action action) {
  with_pieces(numbers, [&](auto pieces) {
    if (uses_tiles()) {
      action(AmxTiles<pieces.value>());
    } else {
      action(VnniTiles<pieces.value>());
    }
  });
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
