// Copies the row of each token to the places of its pairs.
#include "common/simd/simd.h"
#include "moe/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Not by memcpy(): for rows of 8 KB to scattered places, at the same offset in a page as their
// source, glibc 2.36 took four times as long on a Zen 4.
template <bool kStream>
void copy_row(const char* from, char* to, int64_t bytes) {
  constexpr int64_t kBytes = sizeof(u32v);
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) {
    const u32v part = load_bits<u32v>(from + i);
    if constexpr (kStream) {
      stream_bits(to + i, part);
    } else {
      std::memcpy(to + i, &part, sizeof(part));
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
}

void spread(const MoeSpreadArgs& args, int64_t begin, int64_t end) {
  const int64_t pairs = args.sizes.pairs(), bytes = args.row_bytes;
  const char* const x = static_cast<const char*>(args.x);
  char* const out = static_cast<char*>(args.out);
  const bool streams = args.stream_outputs && bytes % sizeof(u32v) == 0 &&
                       reinterpret_cast<uintptr_t>(out) % sizeof(u32v) == 0;
  for (int64_t pair = begin; pair < end; ++pair) {
    const char* const from = x + pair / args.sizes.chosen * bytes;
    const int64_t place = pair / pairs * pairs + moe_place(args.inverse[pair], pairs);
    if (streams) {
      copy_row<true>(from, out + place * bytes, bytes);
    } else {
      copy_row<false>(from, out + place * bytes, bytes);
    }
  }
  finish_streaming();
}

}  // namespace

constinit const MoeSpreadKernels moe_spread_kernels_table = {.of = spread};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
