#include <optional>
#include <string>

#include "common/bind_op.h"
#include "common/errors.h"
#include "common/python_args.h"
#include "rope/python_options.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

// Positions wrap at 2^64, so offsets from 2^63 up equal negative ones.
int64_t to_offset(const char* op, nb::handle value) {
  uint64_t large = 0;
  if (nb::isinstance<nb::int_>(value) && !nb::isinstance<nb::bool_>(value) &&
      nb::try_cast(value, large)) {
    return static_cast<int64_t>(large);
  }
  return to_int(op, "offset", value, "an int, or mlx.core.array");
}

// The default of `base`, recognised by its identity: 10000 beside freqs is an error, no base is
// not.
nb::handle default_base() {
  static const nb::handle base = nb::float_(10000.0).release();
  return base;
}

}  // namespace

RopeOptions to_rope_options(const char* op,
                            nb::handle dims,
                            nb::handle traditional,
                            nb::handle base,
                            nb::handle scale,
                            nb::handle offset,
                            nb::handle freqs) {
  RopeOptions options;
  options.dims = to_int(op, "dims", dims);
  options.traditional = to_bool(op, "traditional", traditional);
  if (!base.is_none() && !(base.is(default_base()) && !freqs.is_none())) {
    options.base = to_number(op, "base", base, "None, or a number");
  }
  options.scale = to_number(op, "scale", scale);
  if (nb::isinstance<mx::array>(offset)) {
    options.offset = nb::cast<mx::array>(offset);
  } else {
    options.offset = to_offset(op, offset);
  }
  options.freqs = to_optional_array(op, "freqs", freqs);
  return options;
}

namespace {

constexpr const char* kRopeDoc =
    R"(Rotary position embedding, like ``mx.fast.rope``, with exact angles at any position.

Formula:
    ``angle(l, j) = (offset + l) * scale * base ** (-2 * j / dims)``;
    ``(a, b) -> (a * cos - b * sin, a * sin + b * cos)`` for the elements ``a = x[..., l, j]`` and
    ``b = x[..., l, j + dims / 2]`` (``2 * j`` and ``2 * j + 1`` with ``traditional``)

Elements from ``dims`` on are copied unchanged. Inputs may have any strides and are not copied.
Sines and cosines are computed once per position and shared by all heads. Angles are reduced in
64-bit integers, so they are as exact at position 10**6 as at position 0.

The gradient in ``x`` is the inverse rotation, computed by the same kernel. Forward mode rotates the
tangent. The gradient in ``freqs`` uses a graph of MLX ops. ``vmap`` works over any of the arrays.

Args:
    x (array): ``[batch, ..., length, head_dim]``; float32, float16 or bfloat16.
    dims (int): number of elements to rotate; even, at most ``head_dim``.
    traditional (bool): pair adjacent elements. Default: ``False``.
    base (float, optional): base of the frequencies. Default: ``10000``, unless ``freqs`` is given.
    scale (float): factor of the positions. Default: ``1``.
    offset (int or array): the first position, a 64-bit integer. An integer array of shape ``()`` or
        ``(batch,)`` may be unevaluated, or differ between batch rows. Default: ``0``.
    freqs (array, optional): ``(dims / 2,)``, instead of ``base``; then
        ``angle = (offset + l) * scale / freqs[j]``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    array: the shape and dtype of ``x``.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: ``dims`` is odd or larger than ``head_dim``; ``base`` and ``freqs`` are given, or
        neither is; ``offset`` or ``freqs`` has a wrong shape or dtype; a dtype is unsupported; the
        stream is on a GPU and MLX has no GPU backend.

Matches ``mx.fast.rope`` (Su et al. 2021, "RoFormer").
)";

constexpr const char* kRopeQkDoc =
    R"(``rope`` of queries and keys in one kernel, which shares all sines and cosines.

Formula:
    as for ``rope``, applied to each row of ``q`` and ``k``

Args:
    q (array): ``[batch, ..., length, head_dim]``.
    k (array): the same dtype, batch, length and head_dim as ``q``; the number of heads may differ.
    dims (int): number of elements to rotate, as for ``rope``.
    traditional (bool): pair adjacent elements. Default: ``False``.
    base (float, optional): base of the frequencies. Default: ``10000``, unless ``freqs`` is given.
    scale (float): factor of the positions. Default: ``1``.
    offset (int or array): the first position, as for ``rope``. Default: ``0``.
    freqs (array, optional): ``(dims / 2,)``, as for ``rope``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array]: the rotated ``q`` and ``k``, with their shapes and dtype.

Raises:
    TypeError: an argument has the wrong type.
    ValueError: as for ``rope``, or ``q`` and ``k`` differ in more than their heads.
)";

constexpr const char* kRopeAndCacheDoc =
    R"(``rope`` of queries and keys that also writes keys and values into caches, in one kernel.

Formula:
    ``q = rope(q)``; ``k_cache[..., offset : offset + length, :] = rope(k)``;
    ``v_cache[..., offset : offset + length, :] = v``

The caches are written in place if nothing else refers to them when the call is evaluated, as MLX's
own slice updates are; otherwise they are copied. So replace the arrays that you pass by the results.

The gradient in ``q``, ``k`` and ``v`` is the inverse rotation, in one kernel, of rows that MLX's ops
select. Forward mode and ``vmap`` use a graph of MLX ops.

Args:
    q (array): ``[batch, heads, length, head_dim]``; float32, float16 or bfloat16.
    k (array, optional): ``[batch, kv_heads, length, head_dim]``. If ``k`` and ``v`` are ``None``,
        ``q`` holds the heads of queries, keys and values, in this order: the result of one product.
    v (array, optional): the shape of ``k``.
    k_cache (array): ``[batch, kv_heads, capacity, head_dim]``.
    v_cache (array): the shape of ``k_cache``.
    dims (int): number of elements to rotate, as for ``rope``.
    traditional (bool): pair adjacent elements. Default: ``False``.
    base (float, optional): base of the frequencies. Default: ``10000``, unless ``freqs`` is given.
    scale (float): factor of the positions. Default: ``1``.
    offset (int or array): the first position, as for ``rope``, and the first row of the caches that
        is written. An int must leave room for all tokens. Of an array, which may be unevaluated,
        positions outside the cache are not written. Default: ``0``.
    freqs (array, optional): ``(dims / 2,)``, as for ``rope``.
    stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

Returns:
    tuple[array, array, array]: the rotated queries and the caches.

Raises:
    TypeError: an argument has the wrong type, or only one of ``k`` and ``v`` is ``None``.
    ValueError: as for ``rope``; dtypes or shapes do not match; an int ``offset`` is negative, or the
        tokens do not fit into the caches.
)";

#define MLX_ANVIL_ROPE_OPTIONS                                                            \
  "dims: int, *, traditional: bool = False, base: float | None = 10000.0, "               \
  "scale: float = 1.0, offset: int | mlx.core.array = 0, freqs: mlx.core.array | None = " \
  "None, stream: " MLX_ANVIL_STREAM_TYPE " = None"

const BindOp bind_rope([](nb::module_& m) {
  m.def(
      "rope",
      [](nb::handle x, nb::handle dims, nb::handle traditional, nb::handle base, nb::handle scale,
         nb::handle offset, nb::handle freqs, nb::handle stream) {
        constexpr const char* op = "rope";
        return rope(to_array(op, "x", x),
                    to_rope_options(op, dims, traditional, base, scale, offset, freqs),
                    to_stream_or_device(op, stream));
      },
      "x"_a.none(), "dims"_a.none(), nb::kw_only(), "traditional"_a.none() = false,
      "base"_a.none() = default_base(), "scale"_a.none() = 1.0, "offset"_a.none() = 0,
      "freqs"_a.none() = nb::none(), "stream"_a = nb::none(),
      nb::sig("def rope(x: mlx.core.array, " MLX_ANVIL_ROPE_OPTIONS ") -> mlx.core.array"),
      kRopeDoc);

  m.def(
      "rope_qk",
      [](nb::handle q, nb::handle k, nb::handle dims, nb::handle traditional, nb::handle base,
         nb::handle scale, nb::handle offset, nb::handle freqs, nb::handle stream) {
        constexpr const char* op = "rope_qk";
        auto [q_out, k_out] =
            rope_qk(to_array(op, "q", q), to_array(op, "k", k),
                    to_rope_options(op, dims, traditional, base, scale, offset, freqs),
                    to_stream_or_device(op, stream));
        return nb::make_tuple(q_out, k_out);
      },
      "q"_a.none(), "k"_a.none(), "dims"_a.none(), nb::kw_only(), "traditional"_a.none() = false,
      "base"_a.none() = default_base(), "scale"_a.none() = 1.0, "offset"_a.none() = 0,
      "freqs"_a.none() = nb::none(), "stream"_a = nb::none(),
      nb::sig("def rope_qk(q: mlx.core.array, k: mlx.core.array, " MLX_ANVIL_ROPE_OPTIONS
              ") -> tuple[mlx.core.array, mlx.core.array]"),
      kRopeQkDoc);

  m.def(
      "rope_and_cache",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
         nb::handle dims, nb::handle traditional, nb::handle base, nb::handle scale,
         nb::handle offset, nb::handle freqs, nb::handle stream) {
        constexpr const char* op = "rope_and_cache";
        const auto optional = [&](const char* name, nb::handle x) {
          return x.is_none() ? std::nullopt : std::optional(to_array(op, name, x));
        };
        if (k.is_none() != v.is_none()) {
          throw_type_error(op, k.is_none() ? "k" : "v", nb::none(),
                           "mlx.core.array, or None for both k and v");
        }
        auto [q_out, keys, values] =
            rope_and_cache(to_array(op, "q", q), optional("k", k), optional("v", v),
                           to_array(op, "k_cache", k_cache), to_array(op, "v_cache", v_cache),
                           to_rope_options(op, dims, traditional, base, scale, offset, freqs),
                           to_stream_or_device(op, stream));
        return nb::make_tuple(q_out, keys, values);
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "k_cache"_a.none(), "v_cache"_a.none(),
      "dims"_a.none(), nb::kw_only(), "traditional"_a.none() = false,
      "base"_a.none() = default_base(), "scale"_a.none() = 1.0, "offset"_a.none() = 0,
      "freqs"_a.none() = nb::none(), "stream"_a = nb::none(),
      nb::sig("def rope_and_cache(q: mlx.core.array, k: mlx.core.array | None, "
              "v: mlx.core.array | None, k_cache: mlx.core.array, v_cache: "
              "mlx.core.array, " MLX_ANVIL_ROPE_OPTIONS
              ") -> tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
      kRopeAndCacheDoc);

  // For patched models: see rope/rope.h.
  m.def(
      "_rope_and_cache_of_token",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
         int heads, nb::handle dims, nb::handle traditional, nb::handle base, nb::handle scale,
         nb::handle offset, nb::handle freqs) -> nb::object {
        constexpr const char* op = "rope_and_cache";
        const auto result = rope_and_cache_of_token(
            to_array(op, "q", q), to_array(op, "k", k), to_array(op, "v", v),
            to_array(op, "k_cache", k_cache), to_array(op, "v_cache", v_cache), heads,
            to_rope_options(op, dims, traditional, base, scale, offset, freqs));
        if (!result) {
          return nb::none();
        }
        const auto& [q_out, keys, values, k_rows, v_rows] = *result;
        return nb::make_tuple(q_out, keys, values, k_rows, v_rows);
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "k_cache"_a.none(), "v_cache"_a.none(), "heads"_a,
      "dims"_a.none(), nb::kw_only(), "traditional"_a.none() = false,
      "base"_a.none() = default_base(), "scale"_a.none() = 1.0, "offset"_a.none() = 0,
      "freqs"_a.none() = nb::none(),
      nb::sig("def _rope_and_cache_of_token(q: mlx.core.array, k: mlx.core.array, "
              "v: mlx.core.array, k_cache: mlx.core.array, v_cache: mlx.core.array, heads: int, "
              "dims: int, *, traditional: bool = False, base: float | None = 10000.0, "
              "scale: float = 1.0, offset: int | mlx.core.array = 0, "
              "freqs: mlx.core.array | None = None) -> tuple[mlx.core.array, mlx.core.array, "
              "mlx.core.array, mlx.core.array, mlx.core.array] | None"));
});

}  // namespace

}  // namespace mlx_anvil
