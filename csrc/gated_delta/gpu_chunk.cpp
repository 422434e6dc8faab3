#include "gated_delta/gpu_chunk.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include "gated_delta/chunk_memory.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kSquare = kChunk * kChunk;
constexpr int64_t kMostSteps = 16;  // that are taken one after the other

// The kernels have 32-bit offsets in the rows of a chunk.
bool are_vectors(std::initializer_list<const mx::array*> arrays) {
  constexpr int64_t kMostStride = std::numeric_limits<int32_t>::max() / kChunk;
  return rows_are_vectors(arrays) &&
         std::all_of(arrays.begin(), arrays.end(),
                     [](const mx::array* x) { return std::abs(x->strides(1)) <= kMostStride; });
}

// Pairs of bfloat16 are for matrix units of 16 bits, with room for the tiles of two chunks.
Products products_of(const DeltaRequest& request, const mx::array* d_y) {
  const GatedDeltaInputs& in = request.in;
  const DeviceTraits traits = device_traits(request.stream.device);
  const Products products = traits.group_products ? Products::kGroups : Products::kPairs;
  const int64_t memory = std::max(walk_memory(request.sizes, products, Walk::kForward),
                                  walk_memory(request.sizes, products, Walk::kBackward));
  const bool takes_pairs = in.q.dtype() == mx::bfloat16 && traits.matrix_units &&
                           memory + kReservedThreadgroupMemory <= traits.threadgroup_memory &&
                           are_vectors({&in.q, &in.k, &in.v, d_y ? d_y : &in.v}) &&
                           (!request.sizes.is_per_channel || are_vectors({&in.g}));
  return takes_pairs ? products : Products::kFloats;
}

class ChunkRequest {
 public:
  // `d_y`: the gradient of y, if gradients are wanted.
  explicit ChunkRequest(const DeltaRequest& request, const mx::array* d_y = nullptr)
      : request_(request),
        params_(request.params()),
        chunks_(ceil_div(request.sizes.length, int64_t{kChunk})),
        products_(products_of(request, d_y)),
        inverse_(planes(kSquare)),
        weights_(matrix(kSquare)),
        rows_(floats(chunk_facts(request.sizes))) {
    params_.end_chunk = static_cast<int32_t>(chunks_);
    if (is_per_channel()) {
      decayed_.emplace(planes(kChunkOperands * kChunk * request.sizes.key_dim));
    }
  }

  // What does not depend on the state. `products`: those of q and k with k, if gradients need them.
  void prepare(Scratch* products = nullptr) {
    const GatedDeltaInputs& in = request_.in;
    KernelLaunch request = launch_of(is_per_channel() ? "chunk_prepare_channels" : "chunk_prepare",
                                     {{kNormalizes, request_.config.normalizes},
                                      {kGIsFloat32, in.g.dtype() == mx::float32},
                                      {kBetaIsFloat32, in.beta.dtype() == mx::float32},
                                      {kKeepsProducts, products != nullptr}});
    request.inputs = {&in.q, &in.k, &in.g, &in.beta, request_.or_q(in.lengths)};
    if (!is_per_channel()) {
      request.inputs.append({request_.or_q(in.skip)});
    }
    request.outputs = {inverse_.get(), weights_.get(), rows_.get(),
                       products ? products->get() : rows_.get()};
    request.temporaries = {&inverse_, &weights_, &rows_};
    if (products) {
      request.temporaries.push_back(products);
    }
    if (decayed_) {
      request.outputs.push_back(decayed_->get());
      request.temporaries.push_back(&*decayed_);
    }
    request.grid = chunks();
    request.grid.x = static_cast<uint32_t>(params_.end_chunk - params_.first_chunk);
    if (!is_per_channel()) {
      request.threadgroup_memory = {prepare_memory(request_.sizes, are_pairs())};
    }
    launch(request, request_.stream);
  }

  // Prepares and walks along one piece after the other. A piece is prepared while the walk along
  // the one before leaves multiprocessors idle.
  void forward(mx::array& y, mx::array& state_out) {
    const int64_t pieces = pieces_of_walk();
    for (int64_t piece = 0; piece < pieces; ++piece) {
      params_.first_chunk = static_cast<int32_t>(piece * chunks_ / pieces);
      params_.end_chunk = static_cast<int32_t>((piece + 1) * chunks_ / pieces);
      prepare();
      mx::array& unused = are_pairs() ? y : state_out;
      launch_forward({&y, &state_out, &unused, &unused}, Walk::kForward,
                     are_vectors({&request_.in.v, &y}), walk_temporaries(),
                     piece > 0 ? &state_out : nullptr);
    }
  }

  // Outputs: the gradients of q, k, v, g, beta, and of the state if there is one.
  void backward(const Arrays& d_outputs, Arrays& outputs) {
    const GatedDeltaInputs& in = request_.in;
    const DeltaSizes& sizes = request_.sizes;
    const mx::array& d_y = d_outputs[0];
    std::copy_n(d_y.strides().begin(), 3, params_.d_y_strides);
    const int64_t columns = ceil_div(sizes.value_dim, int64_t{kChunkValues}) * kChunkValues;
    Scratch products = matrix(is_per_channel() ? kSquare : 2 * kSquare);
    prepare(&products);
    // The two walks do not depend on each other: no array is an output of both.
    Scratch states = matrix(columns * sizes.key_dim), changes = matrix(columns * kChunk);
    Scratch d_states = matrix(columns * sizes.key_dim), d_changes = matrix(columns * kChunk);
    launch_forward({&outputs[0], &outputs[4], states.get(), changes.get()}, Walk::kKeepsStates,
                   are_vectors({&in.v}), walk_temporaries({&states, &changes}));

    KernelLaunch back = launch_of(is_per_channel() ? "chunk_backward_channels" : "chunk_backward",
                                  {{kHasState, request_.config.has_state},
                                   {kValuesAreVectors, are_vectors({&d_y, &outputs[2]})}},
                                  /*by_groups=*/true);
    back.inputs = {
        queries(),      keys(),         &d_y,       &d_outputs[1], request_.or_q(in.lengths),
        inverse_.get(), weights_.get(), rows_.get()};
    back.outputs = {d_states.get(), d_changes.get(), &outputs[2],
                    request_.config.has_state ? &outputs[request_.config.kState] : d_states.get()};
    back.temporaries = walk_temporaries({&d_states, &d_changes});
    back.grid = blocks();
    back.threadgroup_memory = {memory(Walk::kBackward)};
    launch(back, request_.stream);

    Scratch squares = matrix(kChunkSquares * kSquare), sums = floats(kChunkSums * kChunk);
    KernelLaunch pairs =
        launch_of("chunk_backward_squares", {{kValuesAreVectors, are_vectors({&in.v, &d_y})}});
    pairs.inputs = {&in.v,          &d_y,           request_.or_q(in.lengths),
                    rows_.get(),    products.get(), changes.get(),
                    d_changes.get()};
    pairs.outputs = {squares.get(), sums.get()};
    pairs.temporaries = {&rows_, &products, &changes, &d_changes, &squares, &sums};
    pairs.grid = chunks();
    pairs.threadgroup_memory = {are_pairs() ? kTilesOfPairs : kSquareMemory};
    launch(pairs, request_.stream);

    const int64_t panels = sizes.key_dim / kPanel;
    params_.part_heads = heads_of_part();
    params_.token_parts = params_.value_heads / params_.part_heads;
    Scratch parts({static_cast<int>(sizes.batch * sizes.length), params_.token_parts,
                   static_cast<int>((is_per_channel() ? 3 : 2) * sizes.key_dim)},
                  mx::float32, request_.stream);
    Scratch dots = floats(panels * kChunkDots * kChunk);
    KernelLaunch of_keys = launch_of(
        "chunk_backward_keys", {{kValuesAreVectors, are_vectors({&d_y})}}, /*by_groups=*/true);
    of_keys.inputs = {&in.q,           &in.k,        &d_y,          request_.or_q(in.lengths),
                      rows_.get(),     states.get(), changes.get(), d_states.get(),
                      d_changes.get(), squares.get()};
    of_keys.outputs = {parts.get(), dots.get()};
    of_keys.temporaries = {&rows_,     &states,  &changes, &d_states,
                           &d_changes, &squares, &parts,   &dots};
    of_keys.grid = chunks(panels);
    of_keys.grid.y /= static_cast<uint32_t>(params_.part_heads);
    if (products_ == Products::kGroups) {
      of_keys.threadgroup_memory = {kTilesOfKeys};
    }
    launch(of_keys, request_.stream);

    if (is_per_channel()) {
      Scratch rates = floats(sizes.key_dim / kChannels * kChunk);
      launch_decays(squares, dots, parts, rates, outputs[3]);
      launch_gates(sums, rates, outputs);
    } else {
      launch_gates(sums, dots, outputs);
    }
    launch_sum(parts, outputs);
  }

 private:
  // Per channel: the gradients of q, k and g, in the place of what `parts` hold.
  void launch_decays(const Scratch& squares,
                     const Scratch& through,
                     Scratch& parts,
                     Scratch& rates,
                     mx::array& d_g) const {
    const GatedDeltaInputs& in = request_.in;
    KernelLaunch request{};
    request.kernel = &kernel_named(
        kGatedDelta,
        {"gated_delta_chunk_backward_decays_", are_pairs() ? "pairs_" : "", dtype_name(in.q)},
        {{kHasLengths, request_.config.has_lengths},
         {kGIsFloat32, in.g.dtype() == mx::float32},
         {kGIsPerChannel, true}});
    request.inputs = {&in.q,       &in.k,         &in.g,        request_.or_q(in.lengths),
                      rows_.get(), squares.get(), through.get()};
    request.outputs = {parts.get(), rates.get(), &d_g};
    request.params = &params_;
    request.params_size = sizeof(params_);
    request.temporaries = {&rows_, &squares, &through, &parts, &rates};
    request.grid = chunks(request_.sizes.key_dim / kChannels);
    request.threadgroup = {kChunkThreads, 1, 1};
    launch(request, request_.stream);
  }

  // The gradients of g per head, beta and skip.
  void launch_gates(const Scratch& sums, const Scratch& dots, Arrays& outputs) const {
    KernelLaunch request{};
    request.kernel =
        &kernel_named(kGatedDelta, {"gated_delta_chunk_backward_gates_d", request_.sizes.key_dim},
                      {{kHasLengths, request_.config.has_lengths},
                       {kGIsPerChannel, is_per_channel()},
                       {kHasSkip, request_.config.has_skip}});
    request.inputs = {request_.or_q(request_.in.lengths), rows_.get(), sums.get(), dots.get()};
    mx::array& d_beta = outputs[4];
    request.outputs = {is_per_channel() ? &d_beta : &outputs[3], &d_beta,
                       request_.config.has_skip ? &outputs[request_.config.skip_at()] : &d_beta};
    request.params = &params_;
    request.params_size = sizeof(params_);
    request.temporaries = {&rows_, &sums, &dots};
    request.grid = chunks();
    request.threadgroup = {kChunkThreads, 1, 1};
    launch(request, request_.stream);
  }

  // The gradients of q and k, from those of the value heads.
  void launch_sum(const Scratch& parts, Arrays& outputs) const {
    KernelLaunch request{};
    request.kernel =
        &kernel_named(kGatedDelta, {"gated_delta_chunk_sum_", dtype_name(request_.in.q)},
                      {{kNormalizes, request_.config.normalizes},
                       {kGIsPerChannel, is_per_channel()},
                       {kKeysAreVectors, keys_are_vectors()}});
    request.inputs = {&request_.in.q, &request_.in.k, parts.get()};
    request.outputs = {&outputs[0], &outputs[1]};
    request.params = &params_;
    request.params_size = sizeof(params_);
    request.temporaries = {&parts};
    const int64_t rows = request_.sizes.length * request_.sizes.key_heads;
    request.grid = {static_cast<uint32_t>(ceil_div(rows, int64_t{kDeltaSumSimdgroups})), 1,
                    request_.batches()};
    request.threadgroup = {32 * kDeltaSumSimdgroups, 1, 1};
    launch(request, request_.stream);
  }

  // `reached`: the state after the piece before, if there is one.
  void launch_forward(const KernelOutputs& outputs,
                      Walk walk,
                      bool values_are_vectors,
                      const KernelTemporaries& temporaries,
                      const mx::array* reached = nullptr) const {
    const GatedDeltaInputs& in = request_.in;
    KernelLaunch request = launch_of(is_per_channel() ? "chunk_forward_channels" : "chunk_forward",
                                     {{kHasState, reached || request_.config.has_state},
                                      {kKeepsStates, walk == Walk::kKeepsStates},
                                      {kValuesAreVectors, values_are_vectors}},
                                     /*by_groups=*/true);
    request.inputs = {queries(),
                      keys(),
                      &in.v,
                      reached ? reached : request_.or_q(in.state),
                      request_.or_q(in.lengths),
                      inverse_.get(),
                      weights_.get(),
                      rows_.get()};
    request.outputs = outputs;
    request.temporaries = temporaries;
    request.grid = blocks();
    request.threadgroup_memory = {memory(walk)};
    launch(request, request_.stream);
  }

  uint32_t memory(Walk walk) const {
    return static_cast<uint32_t>(walk_memory(request_.sizes, products_, walk));
  }

  mx::Shape shape(int64_t numbers) const {
    const DeltaSizes& sizes = request_.sizes;
    return {static_cast<int>(sizes.batch * sizes.value_heads), static_cast<int>(chunks_),
            static_cast<int>(numbers)};
  }
  // So many numbers per chunk: as float32; as a matrix between kernels (ChunkNumbers); or as all
  // planes of one.
  Scratch floats(int64_t numbers) const {
    return Scratch(shape(numbers), mx::float32, request_.stream);
  }
  Scratch matrix(int64_t numbers) const {
    return are_pairs() ? Scratch(shape(numbers), mx::bfloat16, request_.stream) : floats(numbers);
  }
  Scratch planes(int64_t numbers) const { return matrix(are_pairs() ? 2 * numbers : numbers); }
  bool are_pairs() const { return products_ != Products::kFloats; }
  bool is_per_channel() const { return request_.sizes.is_per_channel; }
  // What the walks read of q and k.
  const mx::array* queries() const { return decayed_ ? decayed_->get() : &request_.in.q; }
  const mx::array* keys() const { return decayed_ ? decayed_->get() : &request_.in.k; }
  KernelTemporaries walk_temporaries(std::initializer_list<const Scratch*> others = {}) const {
    KernelTemporaries all = {&inverse_, &weights_, &rows_};
    if (decayed_) {
      all.push_back(&*decayed_);
    }
    for (const Scratch* one : others) {
      all.push_back(one);
    }
    return all;
  }
  bool keys_are_vectors() const { return are_vectors({&request_.in.q, &request_.in.k}); }
  uint32_t heads() const { return static_cast<uint32_t>(request_.sizes.value_heads); }
  Extent chunks(int64_t panels = 1) const {
    return {static_cast<uint32_t>(chunks_ * panels), heads(), request_.batches()};
  }
  Extent blocks() const {
    return {static_cast<uint32_t>(ceil_div(request_.sizes.value_dim, int64_t{kChunkValues})),
            heads(), request_.batches()};
  }

  // More than one if the walk has fewer threadgroups than there are multiprocessors, and is long. A
  // decay per head is prepared faster than a piece more would start.
  int64_t pieces_of_walk() const {
    constexpr int64_t kMost = 3, kLeastChunks = 16;  // of a piece
    if (!is_per_channel()) {
      return 1;
    }
    const Extent walk = blocks();
    const int64_t threadgroups = int64_t{walk.x} * walk.y * request_.sizes.batch;
    const bool has_idle = threadgroups < device_traits(request_.stream.device).multiprocessors;
    return has_idle ? std::clamp<int64_t>(chunks_ / kLeastChunks, 1, kMost) : 1;
  }

  // Value heads whose gradients of q and k are added up by one threadgroup: as many as leave each
  // multiprocessor its two.
  int32_t heads_of_part() const {
    const DeltaSizes& sizes = request_.sizes;
    if (products_ != Products::kGroups || is_per_channel()) {
      return 1;
    }
    const int64_t least = 2 * device_traits(request_.stream.device).multiprocessors;
    const int64_t all = sizes.batch * sizes.value_heads * chunks_ * (sizes.key_dim / kPanel);
    for (const int32_t heads : {4, 3, 2}) {
      if (sizes.group() % heads == 0 && all / heads >= least) {
        return heads;
      }
    }
    return 1;
  }

  // `by_groups`: the kernel has products of four SIMD groups, where the GPU has.
  KernelLaunch launch_of(const char* variant,
                         FunctionConstants constants,
                         bool by_groups = false) const {
    by_groups = by_groups && products_ == Products::kGroups;
    constants.add({{kHasLengths, request_.config.has_lengths},
                   {kCorrects, request_.config.corrects},
                   {kGIsPerChannel, is_per_channel()},
                   {kHasSkip, request_.config.has_skip},
                   {kKeysAreVectors, keys_are_vectors()}});
    KernelLaunch request{};
    request.kernel = &kernel_named(kGatedDelta,
                                   {"gated_delta_", variant,
                                    by_groups     ? "_group_"
                                    : are_pairs() ? "_pairs_"
                                                  : "_",
                                    dtype_name(request_.in.q), "_d", request_.sizes.key_dim},
                                   constants);
    request.params = &params_;
    request.params_size = sizeof(params_);
    request.threadgroup = {kChunkThreads, 1, 1};
    return request;
  }

  const DeltaRequest& request_;
  GatedDeltaParams params_;
  int64_t chunks_;
  Products products_;
  Scratch inverse_, weights_, rows_;
  std::optional<Scratch> decayed_;  // q and k with a decay per channel
};

}  // namespace

bool takes_chunks(const DeltaRequest& request) {
  const DeltaSizes& sizes = request.sizes;
  const std::optional<mx::array>& state = request.in.state;
  return sizes.length > kMostSteps && !request.config.has_gate && sizes.positions == 0 &&
         (sizes.key_dim == 64 || sizes.key_dim == 128) && (!state || rows_are_vectors({&*state}));
}

void launch_chunk_forward(const DeltaRequest& request, Arrays& outputs) {
  ChunkRequest(request).forward(outputs[0], outputs[1]);
}

void launch_chunk_backward(const DeltaRequest& request, const Arrays& d_outputs, Arrays& outputs) {
  ChunkRequest chunks(request, &d_outputs[0]);
  chunks.backward(d_outputs, outputs);
}

}  // namespace mlx_anvil
