// Scratch memory of one op call, which is not part of any graph.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Owns an array that only this call's launches read and write. The destructor hands the memory to
// the stream, which frees it after those launches.
//
// MLX does not make later kernels wait for such memory, so it must never hold an array of the
// graph. No array can be moved in, and launch() rejects one that was copied out.
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

  // Returns true if nobody else holds the array or its memory.
  bool is_unshared() const { return array_.is_donatable(); }

 private:
  void leave_to_stream() noexcept;

  mx::array array_;
  mx::Stream stream_;
};

}  // namespace mlx_anvil
