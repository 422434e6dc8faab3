// Releases the GIL while a thread waits for another one that may need it.
#pragma once

namespace mlx_anvil {

// Releases the GIL during its lifetime, if the calling thread holds it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* released_;
};

}  // namespace mlx_anvil
