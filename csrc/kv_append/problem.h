// Arguments of kv_append's CPU kernels, as plain data (see common/isa.h).
#pragma once

#include <cstdint>

namespace mlx_anvil {

// One row of dense elements, quantized in groups as mx.quantize does. `columns` is a multiple of
// `group`, which is one of vectors.
struct QuantizeRow {
  const void* x;
  int64_t columns;
  int32_t group, bits;
  uint8_t* w;             // columns * bits / 8 bytes
  void *scales, *biases;  // columns / group elements of the row's dtype
};

struct KvAppendKernels {
  void (*quantize_float32)(const QuantizeRow& row);
  void (*quantize_float16)(const QuantizeRow& row);
  void (*quantize_bfloat16)(const QuantizeRow& row);
};

}  // namespace mlx_anvil
