#include "mla_decode/checks.h"

#include <string>

#include "common/checks.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

std::string with_shape(const NamedArray& x) {
  return std::string(x.name) + " has shape " + to_text(x.value.shape());
}

// Throws unless both arrays have the same extent along each of the axes.
void require_same(const NamedArray& a,
                  const NamedArray& b,
                  std::initializer_list<int> axes,
                  const char* allowed) {
  for (int axis : axes) {
    if (a.value.shape(axis) != b.value.shape(axis)) {
      throw_value_error(kMlaDecode,
                        with_shape(a) + " and " + with_shape(b) + "; allowed: " + allowed + ".");
    }
  }
}

}  // namespace

void check_mla_shapes(const mx::array& q_nope,
                      const mx::array& q_rope,
                      const mx::array& latent,
                      const mx::array& k_rope) {
  const NamedArray of_q = {"q_nope", q_nope}, of_q_rope = {"q_rope", q_rope};
  const NamedArray of_latent = {"latent", latent}, of_k_rope = {"k_rope", k_rope};
  for (const NamedArray& x : {of_q, of_q_rope}) {
    if (x.value.ndim() != 4) {
      throw_value_error(kMlaDecode,
                        with_shape(x) + "; allowed: rank 4, [batch, heads, length, dim].");
    }
  }
  for (const NamedArray& x : {of_latent, of_k_rope}) {
    if (x.value.ndim() != 4 || x.value.shape(1) != 1) {
      throw_value_error(
          kMlaDecode,
          with_shape(x) +
              "; allowed: rank 4, [batch, 1, length, dim]: all heads share one latent.");
    }
  }
  for (const NamedArray& x : {of_latent, of_k_rope}) {
    if (x.value.shape(3) == 0) {
      throw_value_error(kMlaDecode, with_shape(x) + "; allowed: a last axis of at least 1.");
    }
  }
  require_same(of_q, of_q_rope, {0, 1, 2}, "the same batch, heads and length");
  require_same(of_latent, of_k_rope, {0, 2}, "the same batch and length");
  require_same(of_q, of_latent, {0}, "one batch size");
  require_same(of_q, of_latent, {3},
               "one rank (the last axis), with q_nope multiplied by the key part of the up "
               "projection");
  require_same(of_q_rope, of_k_rope, {3}, "one rope dim (the last axis)");
}

}  // namespace mlx_anvil
