// Memory that one call of an op makes for itself and that no graph knows.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Owns an array that only this call's launches read and write. The destructor leaves the memory to
// the stream, which frees it once those launches have run.
//
// MLX does not make later kernels wait for such memory. An array of the graph must therefore never
// end up in one: it cannot be moved in, and launch() refuses one that was copied out.
class Scratch {
 public:
  Scratch(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream);
  Scratch(Scratch&& other) noexcept = default;
  Scratch& operator=(Scratch&& other) noexcept;
  ~Scratch();

  mx::array* get() { return &array_; }
  const mx::array* get() const { return &array_; }
  mx::array& operator*() { return array_; }
  const mx::array& operator*() const { return array_; }

  // Whether nobody else holds the array or its memory.
  bool is_unshared() const { return array_.is_donatable(); }

 private:
  void leave_to_stream() noexcept;

  mx::array array_;
  mx::Stream stream_;
};

}  // namespace mlx_anvil
