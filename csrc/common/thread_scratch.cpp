#include "common/thread_scratch.h"

#include <memory>
#include <new>

namespace mlx_anvil {

void* thread_scratch(int64_t bytes) {
  constexpr std::align_val_t kAlignment{4096};
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, kAlignment); }
  };
  thread_local std::unique_ptr<char[], Free> memory;
  thread_local int64_t capacity = 0;
  if (bytes > capacity) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new[](bytes, kAlignment)));
    capacity = bytes;
  }
  return memory.get();
}

}  // namespace mlx_anvil
