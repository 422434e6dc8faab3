// Prints the build for the best instruction set of this machine (cmake/CpuKernels.cmake).
#include <cstdio>

#include "common/isa.h"

int main() {
  const char* best = "";
  for (mlx_anvil::Isa isa : mlx_anvil::kAllIsas) {
    if (mlx_anvil::isa_supported(isa)) {
      best = mlx_anvil::isa_name(mlx_anvil::build_of(isa));
    }
  }
  std::puts(best);
}
