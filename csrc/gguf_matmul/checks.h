// Checks of matrices in GGUF's blocks, shared by the ops that take one.
#pragma once

#include <optional>
#include <string>

#include "common/checks.h"
#include "gguf_matmul/problem.h"
#include "quantized_matmul/checks.h"

namespace mlx_anvil {

// Returns the kind that a mode names ("q4_k"), or nothing for the other modes of quantized ops.
std::optional<GgufKind> gguf_kind(const std::string& mode);

const char* gguf_mode_name(GgufKind kind);

// Returns K, the columns of a matrix.
int64_t gguf_columns(GgufKind kind, const mx::array& w);

// Throws unless w is uint8 [..., N, a whole number of blocks].
void check_gguf_matrix(const char* op, const char* prefix, GgufKind kind, const mx::array& w);

// Throws unless the last axis of x has `wanted` elements.
void check_gguf_x(
    const char* op, const mx::array& x, const char* w_name, const mx::array& w, int64_t wanted);

}  // namespace mlx_anvil
