// Launches rope's Metal kernels.
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
// A thread of rope_and_cache copies several packs if a cache is large.
constexpr int64_t kMostCopyThreads = 1 << 20;
// Models use one or two sets of frequencies.
constexpr size_t kMostTurnsKept = 64;

// What differs between GPUs.
struct Tuning {
  int64_t most_heads;  // per thread
  bool reads_ahead;    // unless frequencies are given, whose angles take the registers
  bool shares_angles;  // among the threads of a threadgroup, where there are many rows
};

constexpr Tuning kAppleTuning = {8, false, false};
constexpr Tuning kNvidiaTuning = {2, true, true};

// For metal/rope/rope_shared.metal.
constexpr int64_t kLeastThreadsThatShare = 1 << 16;
constexpr int64_t kLeastBlocksOfPositions = 8;

bool is_aligned(const mx::array& x) {
  return rows_are_vectors({&x}, kPackBytes);
}

bool pairs_are_packs(const RopeConfig& config, const mx::array& x) {
  return config.pairs * static_cast<int64_t>(x.itemsize()) % kPackBytes == 0;
}

bool packs_are_aligned(const RopeConfig& config, const Arrays& tensors, const Arrays& outputs) {
  return pairs_are_packs(config, tensors[0]) &&
         std::all_of(tensors.begin(), tensors.end(), is_aligned) &&
         std::all_of(outputs.begin(), outputs.end(), is_aligned);
}

// Packs of a row: of the pairs' first elements, and of the elements that are not rotated.
int64_t columns_of(const RopeParams& params, const mx::array& x) {
  const int64_t pack = kPackBytes / static_cast<int64_t>(x.itemsize());
  return ceil_div(params.pairs, pack) + ceil_div(params.head_dim - 2 * params.pairs, pack);
}

// Divides the heads into chunks, one per thread.
void set_chunks(RopeParams& params, int64_t heads, int64_t threads, const Tuning& tuning) {
  params.chunk =
      static_cast<int32_t>(std::clamp<int64_t>(threads / kEnoughThreads, 1, tuning.most_heads));
  params.chunks = static_cast<int32_t>(ceil_div(heads, params.chunk));
}

// True if threadgroups share angles. The kernel takes whole heads of a power of two.
bool shares_angles(const RopeParams& params, int64_t threads, bool aligned, const Tuning& tuning) {
  const auto pairs = static_cast<uint32_t>(params.pairs);
  return tuning.shares_angles && aligned && 2 * params.pairs == params.head_dim &&
         std::has_single_bit(pairs) && pairs <= kThreads && threads >= kLeastThreadsThatShare &&
         params.length >= kLeastBlocksOfPositions * kThreads / pairs;
}

const Tuning& tuning_of(const mx::Device& device) {
  return device_traits(device).is_nvidia() ? kNvidiaTuning : kAppleTuning;
}

}  // namespace

RopeParams rope_params(const RopeConfig& config,
                       const mx::array& x,
                       const RopePositions& positions) {
  RopeParams params{};
  params.batch = x.shape(0);
  params.length = x.shape(2);
  params.head_dim = x.shape(3);
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
mx::array rope_turns_array(const RopeConfig& config, const mx::Device& device) {
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

void rope_gpu(const RopeConfig& config,
              const Arrays& tensors,
              const RopePositions& positions,
              Arrays& outputs,
              const mx::Stream& stream) {
  RopeParams params = rope_params(config, tensors[0], positions);
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::copy_n(tensors[i].strides().begin(), 4, params.strides[i]);
    params.heads[i] = tensors[i].shape(1);
  }
  const int64_t columns = columns_of(params, tensors[0]);
  const int64_t heads = params.heads[0] + params.heads[1];
  const int64_t threads = columns * params.length * heads * params.batch;
  if (threads == 0) {
    return;
  }
  const Tuning& tuning = tuning_of(stream.device);
  const bool aligned = packs_are_aligned(config, tensors, outputs);
  const bool shares = shares_angles(params, threads, aligned, tuning);
  set_chunks(params, heads, threads, tuning);
  int64_t blocks = ceil_div(columns * params.length * params.chunks, kThreads);
  if (shares) {
    const int64_t together = kPackBytes / static_cast<int64_t>(tensors[0].itemsize());  // heads
    blocks = ceil_div(params.length, kThreads / params.pairs) * ceil_div(heads, together);
  }
  mx::array frequencies =
      positions.freqs ? *positions.freqs : rope_turns_array(config, stream.device);

  KernelLaunch request{};
  request.kernel =
      &kernel_named("rope",
                    {shares ? "rope_shared_" : "rope_", tensors.size() == 1 ? "one_" : "qk_",
                     dtype_name(tensors[0])},
                    {{kPacksAreAligned, aligned},
                     {kPairsAreNeighbours, config.traditional},
                     {kFrequenciesAreGiven, positions.freqs.has_value()},
                     {kOffsetsAreWide, positions.offset.dtype() == mx::int64},
                     {kReadsAhead, tuning.reads_ahead && aligned && !positions.freqs && !shares}});
  for (const mx::array& x : tensors) {
    request.inputs.push_back(&x);
  }
  request.inputs.append({&positions.offset, &frequencies});
  for (mx::array& out : outputs) {
    request.outputs.push_back(&out);
  }
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(blocks), 1,
                  static_cast<uint32_t>(std::min<int64_t>(params.batch, kMostBatches))};
  request.threadgroup = {kThreads, 1, 1};
  launch(request, stream);
  if (frequencies.is_donatable()) {  // neither cached nor the caller's
    keep_until_done({std::move(frequencies)}, stream);
  }
}

void rope_and_cache_gpu(const RopeConfig& config,
                        const RopeCacheOperands& operands,
                        const RopePositions& positions,
                        Arrays& outputs,
                        const mx::Stream& stream) {
  const mx::array& q = *operands.heads[0].array;
  RopeCacheParams params{};
  RopeParams& rope = params.rope = rope_params(config, q, positions);
  bool aligned = pairs_are_packs(config, q) && is_aligned(*operands.k_cache) &&
                 is_aligned(*operands.v_cache) &&
                 std::all_of(outputs.begin(), outputs.end(), is_aligned);
  for (size_t i = 0; i < 3; ++i) {
    const auto& [x, heads, first] = operands.heads[i];
    std::copy_n(x->strides().begin(), 4, i < 2 ? rope.strides[i] : params.value_strides);
    params.first[i] = first;
    aligned = aligned && is_aligned(*x);
  }
  rope.heads[0] = static_cast<int32_t>(operands.heads[0].count);
  rope.heads[1] = static_cast<int32_t>(operands.heads[1].count);
  params.capacity = outputs[1].shape(2);
  const int64_t columns = columns_of(rope, q);
  const int64_t heads = rope.heads[0] + 2 * rope.heads[1];
  const int64_t threads = columns * rope.length * heads * rope.batch;
  set_chunks(rope, heads, threads, tuning_of(stream.device));
  params.columns = static_cast<int32_t>(columns);
  params.rotating = static_cast<int32_t>(columns * rope.length * rope.chunks);
  // Caches that could not be donated are copied, a pack per thread and step.
  params.copied[0] = operands.k_cache->data_shared_ptr() != outputs[1].data_shared_ptr();
  params.copied[1] = operands.v_cache->data_shared_ptr() != outputs[2].data_shared_ptr();
  const int64_t pack = kPackBytes / static_cast<int64_t>(q.itemsize());
  const int64_t packs = ceil_div(rope.head_dim, pack) * params.capacity * rope.heads[1];
  if (params.copied[0] || params.copied[1]) {
    params.copying = static_cast<int32_t>(std::min(packs, kMostCopyThreads));
  }
  const int64_t items = int64_t{params.rotating} + params.copying;
  if (items == 0 || rope.batch == 0) {
    return;
  }
  mx::array frequencies =
      positions.freqs ? *positions.freqs : rope_turns_array(config, stream.device);

  KernelLaunch request{};
  request.kernel = &kernel_named("rope", {"rope_and_cache_", dtype_name(q)},
                                 {{kPacksAreAligned, aligned},
                                  {kPairsAreNeighbours, config.traditional},
                                  {kFrequenciesAreGiven, positions.freqs.has_value()},
                                  {kOffsetsAreWide, positions.offset.dtype() == mx::int64},
                                  {kReadsAhead, false}});
  for (const RopeCacheOperands::Heads& part : operands.heads) {
    request.inputs.push_back(part.array);
  }
  request.inputs.append({operands.k_cache, operands.v_cache, &positions.offset, &frequencies});
  for (mx::array& out : outputs) {
    request.outputs.push_back(&out);
  }
  request.params = &params;
  request.params_size = sizeof(params);
  request.grid = {static_cast<uint32_t>(ceil_div(items, kThreads)), 1,
                  static_cast<uint32_t>(std::min<int64_t>(rope.batch, kMostBatches))};
  request.threadgroup = {kThreads, 1, 1};
  launch(request, stream);
  if (frequencies.is_donatable()) {  // neither cached nor the caller's
    keep_until_done({std::move(frequencies)}, stream);
  }
}

}  // namespace mlx_anvil
