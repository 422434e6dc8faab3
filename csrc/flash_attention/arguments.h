// The Python arguments of flash_attention.
#pragma once

#include <nanobind/nanobind.h>

#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

namespace nb = nanobind;

AttentionOptions to_attention_options(nb::handle scale,
                                      nb::handle mask,
                                      nb::handle sinks,
                                      nb::handle window_size,
                                      nb::handle softcap,
                                      nb::handle return_lse);

// Without and with the log-sum-exp.
extern const char* const kFlashAttentionSignatures[2];
extern const char* const kFlashAttentionDoc;

}  // namespace mlx_anvil
