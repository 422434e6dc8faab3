// Launches the Metal kernels of attention over quantized keys and values.
#include "flash_attention/quantized_gpu.h"

#include <bit>
#include <limits>

#include "common/errors.h"
#include "common/integers.h"
#include "flash_attention/gpu_decode.h"
#include "flash_attention/gpu_forward_tile.h"
#include "flash_attention/gpu_params.h"
#include "metal/flash_attention/tiles.h"

namespace mlx_anvil {

namespace {

// Indices as in metal/flash_attention/quantized.h.
enum QuantizedAttentionConstant : uint32_t {
  kKeysHave4Bits = kFirstOwnConstant + 1,
  kKeysHave8Bits,
  kValuesHave4Bits,
  kValuesHave8Bits,
  kCodesAreFloats,
  kScalesAreE4m3,
  kGroupsHave128,  // quantized_decode_matrix.h
};

void add_constants(FunctionConstants& constants, const QuantizedKvFormats& formats) {
  if (formats.k.kind != formats.v.kind) {
    throw_internal_error(kFlashAttention, "the kernels take keys and values of one mode.");
  }
  constants.add({{kKeysHave4Bits, formats.k.bits == 4},
                 {kKeysHave8Bits, formats.k.bits == 8},
                 {kValuesHave4Bits, formats.v.bits == 4},
                 {kValuesHave8Bits, formats.v.bits == 8},
                 {kCodesAreFloats, !formats.k.has_biases()},
                 {kScalesAreE4m3, formats.k.kind == QuantizedKind::kNvfp4}});
}

const mx::array& biases_or_scales(const QuantizedMatrix& matrix) {
  return matrix.biases ? *matrix.biases : matrix.scales;
}

AttentionCodesParams codes_params(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  AttentionCodesParams params{};
  copy_strides(params.scales_strides, matrix.scales);
  copy_strides(params.biases_strides, biases_or_scales(matrix));
  params.bits = format.bits;
  params.group_shift = std::countr_zero(static_cast<uint32_t>(format.group));
  return params;
}

// True if no offset is negative, or beyond 31 bits.
bool has_short_offsets(const mx::array& x) {
  int64_t last = 0;
  for (int axis = 0; axis < static_cast<int>(x.ndim()); ++axis) {
    const int64_t stride = x.shape(axis) > 1 ? x.strides(axis) : 0;
    if (stride < 0) {
      return false;
    }
    last += (x.shape(axis) - 1) * stride;
  }
  return last <= std::numeric_limits<int32_t>::max();
}

// Strides of axes of length 1 are not used.
bool have_equal_strides(const mx::array& a, const mx::array& b) {
  for (int axis = 0; axis < static_cast<int>(a.ndim()); ++axis) {
    if (a.shape(axis) > 1 && a.strides(axis) != b.strides(axis)) {
      return false;
    }
  }
  return true;
}

// What rows_are_vectors promises of codes: metal/flash_attention/quantized.h. A lane loads at most
// 16 codes at once.
bool loads_vectors(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  const int load_bytes = format.bits == 8 ? 16 : format.bits == 4 ? 8 : 4;
  return rows_are_vectors({&matrix.w}, load_bytes) && has_short_offsets(matrix.w) &&
         has_short_offsets(matrix.scales) &&
         have_equal_strides(matrix.scales, biases_or_scales(matrix));
}

// Affine codes of 4 or 8 bits, as most caches have: the kernels for matrix units take no others.
bool are_common(const QuantizedFormat& format) {
  return format.kind == QuantizedKind::kAffine && (format.bits == 4 || format.bits == 8);
}

// Returns what the decode kernels for matrix units demand of codes, beyond `vectors`:
// metal/flash_attention/quantized_decode_matrix.metal.
DecodeKeys decode_keys(const QuantizedKvFormats& formats,
                       const QuantizedAttentionInputs& in,
                       bool vectors) {
  const auto fits = [&](const QuantizedFormat& format, const QuantizedMatrix& matrix) {
    const int factors_bytes = format.group == 64 && matrix.scales.shape(-1) == 2 ? 4 : 2;
    return are_common(format) && (format.group == 64 || format.group == 128) &&
           format.group == formats.k.group &&
           rows_are_vectors({&matrix.scales, &*matrix.biases}, factors_bytes);
  };
  if (!vectors || !fits(formats.k, in.k) || !fits(formats.v, in.v)) {
    return DecodeKeys::kQuantized;
  }
  const bool narrow = formats.k.bits == 4 && formats.v.bits == 4;
  return narrow ? DecodeKeys::kMatrixCodes : DecodeKeys::kWideMatrixCodes;
}

// True for the codes that metal/flash_attention/quantized_group_tiles.h takes.
bool have_group_codes(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  constexpr int kVectorBytes = 16;
  return are_common(format) && rows_are_vectors({&matrix.w}, kVectorBytes);
}

// Returns null if the call is not one for products of four SIMD groups.
const ForwardTile* group_tile(const AttentionConfig& config,
                              const QuantizedKvFormats& formats,
                              const AttentionSizes& sizes,
                              const QuantizedAttentionInputs& in,
                              bool vectors,
                              const DeviceTraits& traits) {
#define TILE(dtype, type, d, dv, keys, simdgroups)                                        \
  {"quantized_forward_matrix_group", #dtype, d, dv, 16 * (simdgroups), 32 * (simdgroups), \
   memory_of_group_tile(d, dv, keys)},
  static constexpr ForwardTile kTiles[] = {MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_GROUP_TILES(TILE)};
#undef TILE
  const bool takes = vectors && suits_group_products(config, sizes.q_len, traits) &&
                     have_group_codes(formats.k, in.k) && have_group_codes(formats.v, in.v);
  return takes ? first_that_holds(kTiles, dtype_name(in.q), sizes) : nullptr;
}

const ForwardTile& forward_tile(const mx::array& q,
                                const AttentionSizes& sizes,
                                const DeviceTraits& traits) {
#define TILE_OF(pass, dtype, type, d, dv, row_fragments, keys, keeping, simdgroups) \
  {pass, #dtype, d, dv, 8 * (row_fragments) * (simdgroups), 32 * (simdgroups), 0},
#define TILE(...) TILE_OF("quantized_forward", __VA_ARGS__)
#define MATRIX_TILE(...) TILE_OF("quantized_forward_matrix", __VA_ARGS__)
  static constexpr ForwardTile kTiles[] = {MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES(TILE)};
  static constexpr ForwardTile kMatrixTiles[] = {
      MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_MATRIX_TILES(MATRIX_TILE)};
#undef MATRIX_TILE
#undef TILE
#undef TILE_OF
  const ForwardTile* tile = nullptr;
  if (traits.matrix_units) {
    tile = first_that_holds(kMatrixTiles, dtype_name(q), sizes);
  }
  tile = tile ? tile : first_that_holds(kTiles, dtype_name(q), sizes);
  if (!tile) {
    throw_internal_error(kFlashAttention, "no kernel for this head_dim.");
  }
  return *tile;
}

// A call as the kernels of plain keys and values see it, with codes in place of these.
struct Request {
  Request(const AttentionConfig& config,
          const QuantizedKvFormats& formats,
          const AttentionSizes& sizes,
          const QuantizedForwardArrays& arrays)
      : in{arrays.in.q,     arrays.in.k.w,       arrays.in.v.w,  arrays.in.mask,
           arrays.in.sinks, arrays.in.sequences, arrays.in.pages} {
    params.forward.common = attention_params(config, sizes, in);
    copy_strides(params.forward.out_strides, *arrays.out);
    params.keys = codes_params(formats.k, arrays.in.k);
    params.values = codes_params(formats.v, arrays.in.v);
    vectors =
        moves_vectors({in.q, in.q, in.q, in.mask, std::nullopt, std::nullopt}, {arrays.out}) &&
        loads_vectors(formats.k, arrays.in.k) && loads_vectors(formats.v, arrays.in.v);
    launch.inputs = {&arrays.in.q};
    for (const QuantizedMatrix* matrix : {&arrays.in.k, &arrays.in.v}) {
      launch.inputs.push_back(&matrix->w);
      launch.inputs.push_back(&matrix->scales);
      launch.inputs.push_back(&biases_or_scales(*matrix));
    }
    launch.inputs.push_back(in.mask ? &*in.mask : &arrays.in.q);
    launch.inputs.push_back(in.sinks ? &*in.sinks : &arrays.in.q);
    launch.inputs.push_back(&sequences_or_q(in));
    launch.params = &params;
    launch.params_size = sizeof(params);
  }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  AttentionInputs in;
  AttentionQuantizedParams params{};
  bool vectors = false;
  KernelLaunch launch{};
};

}  // namespace

void quantized_attention_forward_gpu(const AttentionConfig& config,
                                     const QuantizedKvFormats& formats,
                                     const AttentionSizes& sizes,
                                     const QuantizedForwardArrays& arrays,
                                     const mx::Stream& stream) {
  if (arrays.out->size() == 0) {
    return;
  }
  Request request(config, formats, sizes, arrays);
  if (is_decode(config, sizes)) {
    request.launch.inputs.push_back(&pages_or_q(request.in));
    fill_pages(request.params.forward, request.in);
    const DecodePlan plan = plan_decode(decode_keys(formats, arrays.in, request.vectors), config,
                                        arrays.in.q, sizes, request.params.forward, stream);
    FunctionConstants constants = decode_constants(config, sizes, request.params.forward, plan,
                                                   request.vectors, arrays.lse != nullptr);
    add_constants(constants, formats);
    if (plan.tile->matrix_units) {
      constants.add({{kGroupsHave128, formats.k.group == 128}});
    }
    launch_decode(request.launch, config, sizes, plan, constants, request.params.forward,
                  {arrays.out, arrays.lse, request.in.sinks ? &*request.in.sinks : nullptr},
                  stream);
    return;
  }
  const DeviceTraits traits = device_traits(stream.device);
  const ForwardTile* grouped =
      group_tile(config, formats, sizes, arrays.in, request.vectors, traits);
  const ForwardTile& tile = grouped ? *grouped : forward_tile(arrays.in.q, sizes, traits);
  const AttentionGrid grid = attention_grid(
      config,
      blocks_of_rows(sizes.q_len, tile.rows, packed_sequences(config, sizes, arrays.in.sequences)),
      sizes.q_heads, sizes.batch, stream.device);
  FunctionConstants constants = attention_constants(config, request.vectors, arrays.lse != nullptr);
  constants.add({grid.constant(), heads_fill_tile(sizes, tile.head_dim, tile.v_head_dim)});
  add_ragged_constants(constants, config);
  constants.add({{static_cast<uint32_t>(AttentionConstant::kPaged), false}});
  add_constants(constants, formats);
  request.launch.kernel = &attention_kernel(tile.kernel(), constants);
  request.launch.outputs = {arrays.out, arrays.lse ? arrays.lse : arrays.out};
  request.launch.grid = grid.extent;
  request.launch.threadgroup = {static_cast<uint32_t>(tile.threads), 1, 1};
  if (tile.memory > 0) {
    request.launch.threadgroup_memory = {static_cast<uint32_t>(tile.memory)};
  }
  launch(request.launch, stream);
}

}  // namespace mlx_anvil
