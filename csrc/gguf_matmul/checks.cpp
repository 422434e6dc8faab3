#include "gguf_matmul/checks.h"

#include "common/errors.h"

namespace mlx_anvil {

namespace {

constexpr const char* kModes[] = {"q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"};

}  // namespace

std::optional<GgufKind> gguf_kind(const std::string& mode) {
  int32_t kind = 0;
  for (const char* name : kModes) {
    if (mode == name) {
      return static_cast<GgufKind>(kind);
    }
    ++kind;
  }
  return std::nullopt;
}

const char* gguf_mode_name(GgufKind kind) {
  return kModes[static_cast<int32_t>(kind)];
}

int64_t gguf_columns(GgufKind kind, const mx::array& w) {
  return int64_t{w.shape(-1)} / gguf_block_bytes(kind) * gguf_block_columns(kind);
}

void check_gguf_matrix(const char* op, const char* prefix, GgufKind kind, const mx::array& w) {
  const std::string name = std::string(prefix) + "w";
  if (w.dtype() != mx::uint8) {
    throw_value_error(op, name + " has dtype " + to_text(w.dtype()) + "; allowed in mode '" +
                              gguf_mode_name(kind) + "': uint8.");
  }
  if (w.ndim() < 2) {
    throw_value_error(op,
                      shape_text(name, w) + "; allowed: rank 2 or more, [..., N, bytes of a row].");
  }
  if (w.shape(-1) % gguf_block_bytes(kind) != 0) {
    throw_value_error(op, shape_text(name, w) + "; allowed in mode '" + gguf_mode_name(kind) +
                              "': rows of a multiple of " + std::to_string(gguf_block_bytes(kind)) +
                              " bytes, each of which is " +
                              std::to_string(gguf_block_columns(kind)) + " columns.");
  }
}

void check_gguf_x(
    const char* op, const mx::array& x, const char* w_name, const mx::array& w, int64_t wanted) {
  if (x.ndim() == 0 || x.shape(-1) != wanted) {
    throw_value_error(op, shape_text("x", x) + " and " + shape_text(w_name, w) +
                              "; allowed: x [..., " + std::to_string(wanted) + "].");
  }
}

}  // namespace mlx_anvil
