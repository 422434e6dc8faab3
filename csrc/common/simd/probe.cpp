#include "common/probe.h"

#include "common/simd/elementwise.h"
#include "common/simd/math.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class Function>
struct Map {
  static constexpr int kInputs = 1;
  static constexpr int kOutputs = 1;
  template <class T>
  static void apply(const f32v* in, f32v* out, float) {
    out[0] = Function::of(in[0]);
  }
};

template <class Function, bool kStream = false>
void map(const float* x, float* out, int64_t count) {
  apply_dense<float, Map<Function>>(&x, &out, count, kStream, 0.0f);
  if (kStream) {
    finish_streaming();
  }
}

struct Exp {
  static f32v of(f32v x) { return exp(x); }
};
template <Accuracy kAccuracy>
struct ExpNonpositive {
  static f32v of(f32v x) { return exp_nonpositive<kAccuracy>(x); }
};
template <Accuracy kAccuracy>
struct Exp2Bounded {
  static f32v of(f32v x) { return exp2_bounded<kAccuracy>(x); }
};
struct Tanh {
  static f32v of(f32v x) { return tanh(x); }
};
struct Identity {
  static f32v of(f32v x) { return x; }
};

// Uses the kernels' blocks. The second conversion undoes a block's element order.
template <class T>
void round_trip(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = count - i < kBlock ? count - i : kBlock;
    float wide[kBlock] = {};
    T narrowed[kBlock];
    std::memcpy(wide, x + i, n * sizeof(float));
    store_block<false>(narrowed, load_block(wide));
    store_block<false>(wide, load_block(narrowed));
    std::memcpy(out + i, wide, n * sizeof(float));
  }
}

float read(const float* x, int64_t count) {
  constexpr int kStreams = 4;
  u32v bits[kStreams] = {};
  int64_t i = 0;
  for (; i + kStreams * kLanes <= count; i += kStreams * kLanes) {
    for (int k = 0; k < kStreams; ++k) {
      bits[k] ^= load_bits<u32v>(x + i + k * kLanes);
    }
  }
  float rest = 0;
  for (; i < count; ++i) {
    rest += x[i];
  }
  const u32v all = (bits[0] ^ bits[1]) ^ (bits[2] ^ bits[3]);
  return bits_as<f32v>(all)[0] + rest;
}

}  // namespace

constinit const Probe probe_table = {
    .exp = map<Exp>,
    .exp_nonpositive = map<ExpNonpositive<Accuracy::kFloat32>>,
    .exp_nonpositive_float16 = map<ExpNonpositive<Accuracy::kFloat16>>,
    .exp_nonpositive_bfloat16 = map<ExpNonpositive<Accuracy::kBfloat16>>,
    .exp2_bounded = map<Exp2Bounded<Accuracy::kFloat32>>,
    .exp2_bounded_float16 = map<Exp2Bounded<Accuracy::kFloat16>>,
    .tanh = map<Tanh>,
    .through_float16 = round_trip<f16>,
    .through_bfloat16 = round_trip<bf16>,
    .stream_copy = map<Identity, true>,
    .read = read,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
