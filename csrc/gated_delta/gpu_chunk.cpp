#include "gated_delta/gpu_chunk.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "metal/gated_delta/chunk_sizes.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kSquare = kChunk * kChunk;
constexpr int64_t kMostSteps = 16;  // that are taken one after the other

// Bytes of threadgroup memory of the kernels that walk (metal/gated_delta/chunk_walk.h). Rows of
// tiles are 16 bytes longer than their columns.
int64_t walk_memory(int64_t key_dim, bool pairs, int64_t weight_planes) {
  const int64_t facts = int64_t{4} * kChunkRows * kChunk;
  const int64_t tiles = 2 * (key_dim / kPanel) + 3 + weight_planes;
  return pairs ? 2 * (facts + tiles * kChunk * (2 * kChunk + 16))
               : facts + kChunk * (4 * kChunk + 16);
}

// The kernels have 32-bit offsets in the rows of a chunk.
bool are_vectors(std::initializer_list<const mx::array*> arrays) {
  constexpr int64_t kMostStride = std::numeric_limits<int32_t>::max() / kChunk;
  return rows_are_vectors(arrays) &&
         std::all_of(arrays.begin(), arrays.end(),
                     [](const mx::array* x) { return std::abs(x->strides(1)) <= kMostStride; });
}

// Pairs of bfloat16 are for matrix units of 16 bits, with room for the tiles of two chunks.
bool takes_pairs(const DeltaRequest& request, const mx::array* d_y) {
  const GatedDeltaInputs& in = request.in;
  const DeviceTraits traits = device_traits(request.stream.device);
  const int64_t memory = walk_memory(request.sizes.key_dim, true, d_y ? 2 : 1);
  return in.q.dtype() == mx::bfloat16 && traits.matrix_units &&
         memory + kReservedThreadgroupMemory <= traits.threadgroup_memory &&
         are_vectors({&in.q, &in.k, &in.v, d_y ? d_y : &in.v});
}

class ChunkRequest {
 public:
  // `d_y`: the gradient of y, if gradients are wanted.
  explicit ChunkRequest(const DeltaRequest& request, const mx::array* d_y = nullptr)
      : request_(request),
        params_(request.params()),
        chunks_(ceil_div(request.sizes.length, int64_t{kChunk})),
        pairs_(takes_pairs(request, d_y)),
        inverse_(scratch(pairs_ ? 2 * kSquare : kSquare)),
        weights_(scratch(pairs_ ? 2 * kSquare : kSquare)),
        rows_(Scratch(shape(kChunkRows * kChunk), mx::float32, request.stream)) {}

  // What does not depend on the state. `products`: those of q and k with k, if gradients need them.
  void prepare(Scratch* products = nullptr) {
    const GatedDeltaInputs& in = request_.in;
    KernelLaunch request =
        launch_of("chunk_prepare", {{kNormalizes, request_.config.normalizes},
                                    {kGIsFloat32, in.g.dtype() == mx::float32},
                                    {kBetaIsFloat32, in.beta.dtype() == mx::float32},
                                    {kKeepsProducts, products != nullptr}});
    request.inputs = {
        &in.q, &in.k, &in.g, &in.beta, request_.or_q(in.lengths), request_.or_q(in.skip)};
    request.outputs = {inverse_.get(), weights_.get(), rows_.get(),
                       products ? products->get() : rows_.get()};
    request.temporaries = {&inverse_, &weights_, &rows_};
    if (products) {
      request.temporaries.push_back(products);
    }
    request.grid = {static_cast<uint32_t>(chunks_), heads(), request_.batches()};
    launch(request, request_.stream);
  }

  void forward(mx::array& y, mx::array& state_out) {
    launch_forward({&y, &state_out, &state_out}, /*keeps_states=*/false,
                   are_vectors({&request_.in.v, &y}), {&inverse_, &weights_, &rows_});
  }

  // Outputs: the gradients of q, k, v, g, beta, and of the state if there is one.
  void backward(const Arrays& d_outputs, Arrays& outputs) {
    const GatedDeltaInputs& in = request_.in;
    const DeltaSizes& sizes = request_.sizes;
    const mx::array& d_y = d_outputs[0];
    std::copy_n(d_y.strides().begin(), 3, params_.d_y_strides);
    const int64_t columns = ceil_div(sizes.value_dim, int64_t{kChunkValues}) * kChunkValues;
    const auto floats = [&](int64_t numbers) {
      return Scratch(shape(numbers), mx::float32, request_.stream);
    };
    Scratch products = floats(2 * kSquare);
    prepare(&products);
    Scratch states = floats(columns * sizes.key_dim), changes = floats(columns * kChunk);
    Scratch d_states = floats(columns * sizes.key_dim), d_changes = floats(columns * kChunk);
    launch_forward({&outputs[2], states.get(), changes.get()}, /*keeps_states=*/true,
                   are_vectors({&in.v}), {&inverse_, &weights_, &rows_, &states, &changes});

    KernelLaunch back =
        launch_of("chunk_backward", {{kHasState, request_.config.has_state},
                                     {kValuesAreVectors, are_vectors({&d_y, &outputs[2]})}});
    back.inputs = {
        &in.q,          &in.k,          &d_y,       &d_outputs[1], request_.or_q(in.lengths),
        inverse_.get(), weights_.get(), rows_.get()};
    back.outputs = {d_states.get(), d_changes.get(), &outputs[2],
                    request_.config.has_state ? &outputs[request_.config.kState] : d_states.get()};
    back.temporaries = {&inverse_, &weights_, &rows_, &d_states, &d_changes};
    back.grid = blocks();
    back.threadgroup_memory = {memory(2)};
    launch(back, request_.stream);

    const Extent chunks = {static_cast<uint32_t>(chunks_), heads(), request_.batches()};
    Scratch squares = floats(2 * kSquare), sums = floats(kChunkSums * kChunk);
    KernelLaunch pairs =
        launch_of("chunk_backward_squares", {{kValuesAreVectors, are_vectors({&in.v, &d_y})}});
    pairs.inputs = {&in.v,          &d_y,           request_.or_q(in.lengths),
                    rows_.get(),    products.get(), changes.get(),
                    d_changes.get()};
    pairs.outputs = {squares.get(), sums.get()};
    pairs.temporaries = {&rows_, &products, &changes, &d_changes, &squares, &sums};
    pairs.grid = chunks;
    launch(pairs, request_.stream);

    const int64_t panels = sizes.key_dim / kPanel;
    Scratch parts({static_cast<int>(sizes.batch * sizes.length),
                   static_cast<int>(sizes.value_heads), static_cast<int>(request_.part_size())},
                  mx::float32, request_.stream);
    Scratch dots = floats(panels * kChunkDots * kChunk);
    KernelLaunch keys =
        launch_of("chunk_backward_keys", {{kValuesAreVectors, are_vectors({&d_y})}});
    keys.inputs = {&in.q,           &in.k,        &d_y,          request_.or_q(in.lengths),
                   rows_.get(),     states.get(), changes.get(), d_states.get(),
                   d_changes.get(), squares.get()};
    keys.outputs = {parts.get(), dots.get()};
    keys.temporaries = {&rows_, &states, &changes, &d_states, &d_changes, &squares, &parts, &dots};
    keys.grid = {static_cast<uint32_t>(chunks_ * panels), heads(), request_.batches()};
    launch(keys, request_.stream);

    KernelLaunch gates{};
    gates.kernel = &kernel_named(
        kGatedDelta, {"gated_delta_chunk_backward_gates_d", sizes.key_dim},
        {{kHasLengths, request_.config.has_lengths}, {kHasSkip, request_.config.has_skip}});
    gates.inputs = {request_.or_q(in.lengths), rows_.get(), sums.get(), dots.get()};
    gates.outputs = {parts.get()};
    gates.params = &params_;
    gates.params_size = sizeof(params_);
    gates.temporaries = {&rows_, &sums, &dots, &parts};
    gates.grid = chunks;
    gates.threadgroup = {kChunkThreads, 1, 1};
    launch(gates, request_.stream);

    // `parts` has all steps in one chunk, and one block of rows.
    params_.chunk = params_.length;
    params_.blocks = 1;
    request_.sum(params_, parts, outputs);
  }

 private:
  void launch_forward(const KernelOutputs& outputs,
                      bool keeps_states,
                      bool values_are_vectors,
                      const KernelTemporaries& temporaries) const {
    const GatedDeltaInputs& in = request_.in;
    KernelLaunch request = launch_of("chunk_forward", {{kHasState, request_.config.has_state},
                                                       {kKeepsStates, keeps_states},
                                                       {kValuesAreVectors, values_are_vectors}});
    request.inputs = {&in.q,
                      &in.k,
                      &in.v,
                      request_.or_q(in.state),
                      request_.or_q(in.lengths),
                      inverse_.get(),
                      weights_.get(),
                      rows_.get()};
    request.outputs = outputs;
    request.temporaries = temporaries;
    request.grid = blocks();
    request.threadgroup_memory = {memory(1)};
    launch(request, request_.stream);
  }

  uint32_t memory(int64_t weight_planes) const {
    return static_cast<uint32_t>(walk_memory(request_.sizes.key_dim, pairs_, weight_planes));
  }

  mx::Shape shape(int64_t numbers) const {
    const DeltaSizes& sizes = request_.sizes;
    return {static_cast<int>(sizes.batch * sizes.value_heads), static_cast<int>(chunks_),
            static_cast<int>(numbers)};
  }
  Scratch scratch(int64_t numbers) const {
    return Scratch(shape(numbers), pairs_ ? mx::bfloat16 : mx::float32, request_.stream);
  }
  bool keys_are_vectors() const { return are_vectors({&request_.in.q, &request_.in.k}); }
  uint32_t heads() const { return static_cast<uint32_t>(request_.sizes.value_heads); }
  Extent blocks() const {
    return {static_cast<uint32_t>(ceil_div(request_.sizes.value_dim, int64_t{kChunkValues})),
            heads(), request_.batches()};
  }

  KernelLaunch launch_of(const char* variant, FunctionConstants constants) const {
    constants.add({{kHasLengths, request_.config.has_lengths},
                   {kCorrects, request_.config.corrects},
                   {kHasSkip, request_.config.has_skip},
                   {kKeysAreVectors, keys_are_vectors()}});
    KernelLaunch request{};
    request.kernel = &kernel_named(kGatedDelta,
                                   {"gated_delta_", variant, pairs_ ? "_pairs_" : "_",
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
  bool pairs_;  // of bfloat16
  Scratch inverse_, weights_, rows_;
};

}  // namespace

bool takes_chunks(const DeltaRequest& request) {
  const DeltaSizes& sizes = request.sizes;
  const std::optional<mx::array>& state = request.in.state;
  return sizes.length > kMostSteps && !sizes.is_per_channel && !request.config.has_gate &&
         sizes.positions == 0 && (sizes.key_dim == 64 || sizes.key_dim == 128) &&
         (!state || rows_are_vectors({&*state}));
}

void launch_chunk_forward(const DeltaRequest& request, Arrays& outputs) {
  ChunkRequest chunks(request);
  chunks.prepare();
  chunks.forward(outputs[0], outputs[1]);
}

void launch_chunk_backward(const DeltaRequest& request, const Arrays& d_outputs, Arrays& outputs) {
  ChunkRequest chunks(request, &d_outputs[0]);
  chunks.backward(d_outputs, outputs);
}

}  // namespace mlx_anvil
