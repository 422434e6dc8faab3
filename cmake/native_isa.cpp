// Prints the best instruction set that this machine has (cmake/CpuKernels.cmake).
#include <cstdio>

#include "common/isa.h"

int main() {
  const char* best = "";
  for (mlx_anvil::Isa isa : mlx_anvil::kAllIsas) {
    if (mlx_anvil::isa_supported(isa)) {
      best = mlx_anvil::isa_name(isa);
    }
  }
  std::puts(best);
}
