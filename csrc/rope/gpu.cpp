// Launches rope's Metal kernel.
#include "rope/gpu.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "common/device_traits.h"
#include "common/integers.h"
#include "common/launch.h"
#include "common/launch_arrays.h"
#include "metal/rope/params.h"

namespace mlx_anvil {

namespace {

// Indices as in metal/common/strided_pack.h and metal/rope/rope.h.
enum Constant : uint32_t {
  kPacksAreAligned,
  kPairsAreNeighbours,
  kFrequenciesAreGiven,
  kOffsetsAreWide,
  kReadsAhead,
};

constexpr int64_t kThreads = 256;
constexpr int64_t kPackBytes = 16;
// A thread reuses its angles for several heads, as long as kEnoughThreads threads have work.
constexpr int64_t kEnoughThreads = 1 << 15;
constexpr int64_t kMostBatches = 65535;  // limit of a grid's z dimension
// Models use one or two sets of frequencies.
constexpr size_t kMostTurnsKept = 64;

// What differs between GPUs.
struct Tuning {
  int64_t most_heads;  // per thread
  bool reads_ahead;    // unless frequencies are given, whose angles take the registers
};

constexpr Tuning kAppleTuning = {8, false};
constexpr Tuning kNvidiaTuning = {2, true};

bool packs_are_aligned(const RopeConfig& config, const Arrays& tensors, const Arrays& outputs) {
  const auto aligned = [](const mx::array& x) { return rows_are_vectors({&x}, kPackBytes); };
  return config.pairs * static_cast<int64_t>(tensors[0].itemsize()) % kPackBytes == 0 &&
         std::all_of(tensors.begin(), tensors.end(), aligned) &&
         std::all_of(outputs.begin(), outputs.end(), aligned);
}

RopeParams params_of(const RopeConfig& config,
                     const Arrays& tensors,
                     const RopePositions& positions) {
  RopeParams params{};
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::copy_n(tensors[i].strides().begin(), 4, params.strides[i]);
    params.heads[i] = tensors[i].shape(1);
  }
  params.batch = tensors[0].shape(0);
  params.length = tensors[0].shape(2);
  params.head_dim = tensors[0].shape(3);
  params.pairs = config.pairs;
  params.offset_step = positions.offset.size() > 1;
  const double over_freqs = rope_turns_over_freqs(config.frequencies);
  params.turns_high = static_cast<float>(over_freqs);
  params.turns_low = static_cast<float>(over_freqs - params.turns_high);
  params.direction = config.inverse ? -1.0f : 1.0f;
  return params;
}

// Cached across launches. On CUDA, freshly written host memory migrates to the GPU on first use,
// which takes ten times as long as the kernel. Entries are never evicted, because running kernels
// may read them. Once the cache is full, further arrays last for one call.
mx::array turns_array(const RopeConfig& config, const mx::Device& device) {
  using Key = std::tuple<uint64_t, uint64_t, int64_t, mx::Device::DeviceType, int>;
  static std::mutex mutex;
  static auto& kept = *new std::map<Key, mx::array>;  // leaked: MLX may shut down first
  const auto& [base, scale] = config.frequencies;
  const Key key{std::bit_cast<uint64_t>(base), std::bit_cast<uint64_t>(scale), config.pairs,
                device.type, device.index};
  std::lock_guard lock(mutex);
  if (const auto known = kept.find(key); known != kept.end()) {
    return known->second;
  }
  const std::vector<uint64_t> turns = rope_turns(config.frequencies, config.pairs);
  const mx::array made(turns.begin(), mx::Shape{config.pairs}, mx::uint64);
  if (kept.size() < kMostTurnsKept) {
    kept.emplace(key, made);
  }
  return made;
}

}  // namespace

void rope_gpu(const RopeConfig& config,
              const Arrays& tensors,
              const RopePositions& positions,
              Arrays& outputs,
              const mx::Stream& stream) {
  RopeParams params = params_of(config, tensors, positions);
  const int64_t pack = kPackBytes / static_cast<int64_t>(tensors[0].itemsize());
  const int64_t columns =
      ceil_div(params.pairs, pack) + ceil_div(params.head_dim - 2 * params.pairs, pack);
  const int64_t heads = params.heads[0] + params.heads[1];
  const int64_t threads = columns * params.length * heads * params.batch;
  if (threads == 0) {
    return;
  }
  const Tuning& tuning = device_traits(stream.device).is_nvidia() ? kNvidiaTuning : kAppleTuning;
  params.chunk =
      static_cast<int32_t>(std::clamp<int64_t>(threads / kEnoughThreads, 1, tuning.most_heads));
  params.chunks = static_cast<int32_t>(ceil_div(heads, params.chunk));
  mx::array frequencies = positions.freqs ? *positions.freqs : turns_array(config, stream.device);

  KernelLaunch request{};
  const bool aligned = packs_are_aligned(config, tensors, outputs);
  request.kernel = &kernel_named(
      "rope", {tensors.size() == 1 ? "rope_one_" : "rope_qk_", dtype_name(tensors[0])},
      {{kPacksAreAligned, aligned},
       {kPairsAreNeighbours, config.traditional},
       {kFrequenciesAreGiven, positions.freqs.has_value()},
       {kOffsetsAreWide, positions.offset.dtype() == mx::int64},
       {kReadsAhead, tuning.reads_ahead && aligned && !positions.freqs}});
  for (const mx::array& x : tensors) {
    request.inputs.push_back(&x);
  }
  request.inputs.append({&positions.offset, &frequencies});
  for (mx::array& out : outputs) {
    request.outputs.push_back(&out);
  }
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {
      static_cast<uint32_t>(ceil_div(columns * params.length * params.chunks, kThreads)), 1,
      static_cast<uint32_t>(std::min<int64_t>(params.batch, kMostBatches))};
  request.threadgroup = {kThreads, 1, 1};
  launch(request, stream);
  if (frequencies.is_donatable()) {  // neither cached nor the caller's
    keep_until_done({std::move(frequencies)}, stream);
  }
}

}  // namespace mlx_anvil
