#include "distributed/simd/ring.h"

#include "flash_attention/simd/rows.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

void join(const AttentionForwardArgs& args, const AttentionRows& rows, const float* partials) {
  const int64_t columns = args.sizes.v_head_dim;
  for (int64_t r = 0; r < row_count(rows); ++r) {
    const float* part = partials + r * (columns + 2);
    const float top = part[columns], sum = part[columns + 1];
    if (top == -kInfinity && sum == 0) {
      continue;  // the row sees none of these keys
    }
    const int64_t head = head_of(rows, r), query = query_of(rows, r);
    float& lse = args.lse[(rows.batch * args.sizes.q_heads + head) * args.lse_stride + query];
    float* out =
        row_address(static_cast<float*>(args.out.data), args.out.strides, rows.batch, head, query);
    // Weights relative to the larger of the two maxima, in the log2 domain.
    const float before = lse * kLog2E;
    const float larger_one = before > top ? before : top;
    const float kept = lse == -kInfinity ? 0.0f : exp2_of(before - larger_one);
    const float added = exp2_of(top - larger_one);
    const float total = kept + added * sum;
    const float keep = kept / total, add = added / total;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const f32v x =
          load_columns(out, 1, c, columns) * keep + load_columns(part, 1, c, columns) * add;
      store_columns(out, c, columns, x);
    }
    lse = larger_one * kLn2 + __builtin_logf(total);
  }
}

void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_columns(to, i, count, load_columns(to, 1, i, count) + load_columns(from, 1, i, count));
  }
}

template <class T>
void store(const float* from, int64_t rows, int64_t columns, void* to, int64_t row_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    T* const row = static_cast<T*>(to) + r * row_stride;
    for (int64_t c = 0; c < columns; c += kLanes) {
      store_columns(row, c, columns, load_columns(from + r * columns, 1, c, columns));
    }
  }
}

template <class T>
constexpr RingKernels kernels() {
  return {.join = join, .add = add, .store = store<T>};
}

}  // namespace

constinit const PerDtype<RingKernels> ring_kernels_table = {
    .float32 = kernels<float>(), .float16 = kernels<f16>(), .bfloat16 = kernels<bf16>()};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
