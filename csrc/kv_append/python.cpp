#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>

#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "kv_append/kv_append.h"
#include "quantized_matmul/python_matrix.h"
#include "rope/python_options.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

constexpr const char* kRopeKeys[] = {"dims", "traditional", "base", "scale", "offset", "freqs"};

// The keyword arguments of rope, as a dict.
void set_rope(KvAppendOptions& options, nb::handle rope) {
  if (rope.is_none()) {
    return;
  }
  if (!nb::isinstance<nb::dict>(rope)) {
    throw_type_error(kKvAppend, "rope", rope, "None, or a dict of rope's options");
  }
  const auto given = nb::borrow<nb::dict>(rope);
  for (nb::handle key : given.keys()) {
    const std::string name = nb::str(key).c_str();
    if (std::find(std::begin(kRopeKeys), std::end(kRopeKeys), name) == std::end(kRopeKeys)) {
      throw_value_error(kKvAppend,
                        "rope has the key '" + name +
                            "'; allowed: dims, traditional, base, scale, offset, freqs.");
    }
  }
  const auto of = [&](const char* name, nb::object standard) -> nb::object {
    return given.contains(name) ? nb::object(given[name]) : standard;
  };
  if (!given.contains("dims")) {
    throw_value_error(kKvAppend,
                      "rope has no 'dims'; allowed: a dict with dims, the number of "
                      "elements to rotate.");
  }
  const nb::object freqs = of("freqs", nb::none());
  const nb::object base =
      of("base", freqs.is_none() ? nb::object(nb::float_(10000.0)) : nb::none());
  const nb::object offset = of("offset", nb::none());
  options.rope = to_rope_options(
      kKvAppend, of("dims", nb::none()), of("traditional", nb::bool_(false)), base,
      of("scale", nb::float_(1.0)), offset.is_none() ? nb::object(nb::int_(0)) : offset, freqs);
  if (offset.is_none()) {
    return;
  }
  if (const int64_t* number = std::get_if<int64_t>(&options.rope->offset)) {
    options.rope_offset = *number;
  } else {
    options.rope_offset = std::get<mx::array>(options.rope->offset);
    options.rope->offset = int64_t{0};
  }
}

KvCache to_cache(const char* name, nb::handle cache) {
  if (is_quantized_tuple(cache)) {
    return to_quantized_tuple(kKvAppend, name, cache);
  }
  return to_array(kKvAppend, name, cache);
}

nb::object to_python(const KvCache& cache) {
  if (const auto* array = std::get_if<mx::array>(&cache)) {
    return nb::cast(*array);
  }
  const auto& matrix = std::get<QuantizedMatrix>(cache);
  return matrix.biases ? nb::make_tuple(matrix.w, matrix.scales, *matrix.biases)
                       : nb::make_tuple(matrix.w, matrix.scales);
}

constexpr const char* kDoc =
    R"(Writes new keys and values into a cache in one kernel, and rotates and quantizes them on the way.

Formula:
    ``cache_k[b, h, row(b, t)] = quantize(rope(k[b, h, t]))``; ``cache_v[b, h, row(b, t)] =
    quantize(v[b, h, t])``, with ``row(b, t) = offset[b] + t``, or ``slots[b, t]``

Codes, scales and biases have the bits of ``mx.quantize`` of the rotated keys. The caches are written
in place if nothing else refers to them when the call is evaluated, as MLX's own slice updates are;
otherwise they are copied. So replace the arrays that you pass by the results.

A cache may consist of pages: with a batch of 1, its first axis counts them, and row ``r`` is row
``r % page_size`` of page ``r // page_size``. Rows that the cache lacks are not written, negative
ones among them. If several tokens of a batch row have the same slot, the last one is written.

Gradients, forward mode and ``vmap`` of plain caches use graphs of MLX ops. A quantized cache has no
derivative; asking for one is an error.

Args:
    cache_k (array or tuple): ``[batch or pages, kv_heads, capacity, head_dim]``, or the tuple ``(w,
        scales[, biases])`` of ``mx.quantize`` of such an array.
    cache_v (array or tuple): likewise; its ``head_dim`` may be another.
    k (array): ``[batch, kv_heads, length, head_dim]``; float32, float16 or bfloat16, the dtype of
        the caches or of their scales.
    v (array): likewise.
    offset (int or array, optional): the first row that is written, an integer or an integer array of
        shape ``()`` or ``(batch,)``. Either ``offset`` or ``slots`` is given.
    slots (array, optional): ``[batch, length]``, or ``[length]`` with a batch of 1: the row of each
        token. A token with a negative one is not written.
    rope (dict, optional): how to rotate keys: ``dims`` and, as for ``rope``, ``traditional``,
        ``base``, ``scale``, ``freqs`` and ``offset``, the position of the first token. The position
        is the row by default. With ``slots``, ``offset`` is required, and may have their shape: the
        position of each token. Default: ``None``, keys are stored as they are.
    kv_group_size (int, optional): group size of quantized caches. Default: that of ``kv_mode``.
    kv_bits (int or (int, int), optional): likewise; a pair is of keys and of values.
    kv_mode (str): ``'affine'``, ``'mxfp4'``, ``'mxfp8'`` or ``'nvfp4'``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple: the caches, each an array or a tuple as it was passed.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: dtypes, shapes or formats do not match; both or none of ``offset`` and ``slots`` are
        given; a row is outside the cache, if that is known at the call: an int, or an evaluated array
        on the CPU; options of ``rope`` are wrong.
)";

#define MLX_ANVIL_KV_CACHE "mlx.core.array | tuple[mlx.core.array, ...] | list[mlx.core.array]"

const BindOp bind_kv_append([](nb::module_& m) {
  m.def(
      "kv_append",
      [](nb::handle cache_k, nb::handle cache_v, nb::handle k, nb::handle v, nb::handle offset,
         nb::handle slots, nb::handle rope, nb::handle kv_group_size, nb::handle kv_bits,
         nb::handle kv_mode, nb::handle stream) {
        KvAppendOptions options;
        std::tie(options.k_format, options.v_format) =
            to_kv_options(kKvAppend, kv_group_size, kv_bits, kv_mode);
        const KvCache keys = to_cache("cache_k", cache_k), values = to_cache("cache_v", cache_v);
        if (keys.index() != values.index()) {
          throw_value_error(kKvAppend, std::string(keys.index() == 1 ? "cache_k" : "cache_v") +
                                           " is quantized and the other cache is an array; "
                                           "allowed: both, or neither.");
        }
        if (keys.index() == 0) {
          require_no_kv_options(kKvAppend, options.k_format, "cache_k and cache_v");
        }
        if (nb::isinstance<mx::array>(offset)) {
          options.offset = nb::cast<mx::array>(offset);
        } else if (!offset.is_none()) {
          options.offset = to_int(kKvAppend, "offset", offset, "None, an int, or mlx.core.array");
        }
        options.slots = to_optional_array(kKvAppend, "slots", slots);
        set_rope(options, rope);
        const auto [a, b] =
            kv_append(keys, values, to_array(kKvAppend, "k", k), to_array(kKvAppend, "v", v),
                      options, to_stream_or_device(kKvAppend, stream));
        return nb::make_tuple(to_python(a), to_python(b));
      },
      "cache_k"_a.none(), "cache_v"_a.none(), "k"_a.none(), "v"_a.none(), nb::kw_only(),
      "offset"_a = nb::none(), "slots"_a = nb::none(), "rope"_a = nb::none(),
      "kv_group_size"_a = nb::none(), "kv_bits"_a = nb::none(), "kv_mode"_a.none() = "affine",
      "stream"_a = nb::none(),
      nb::sig("def kv_append(cache_k: " MLX_ANVIL_KV_CACHE ", cache_v: " MLX_ANVIL_KV_CACHE
              ", k: mlx.core.array, v: mlx.core.array, *, offset: int | mlx.core.array | None = "
              "None, slots: mlx.core.array | None = None, rope: dict[str, typing.Any] | None = "
              "None, kv_group_size: int | None = None, kv_bits: int | tuple[int, int] | None = "
              "None, kv_mode: str = 'affine', stream: " MLX_ANVIL_STREAM_TYPE
              " = None) -> tuple[typing.Any, typing.Any]"),
      kDoc);
});

}  // namespace

}  // namespace mlx_anvil
