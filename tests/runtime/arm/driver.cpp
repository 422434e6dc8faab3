// Checks kernels of 64-bit Arm. Runs under an emulator (test_arm.py).
//   driver SEED ISA...    the instruction sets that this machine must have; the last one is used
#include "driver.h"

#include <cstdlib>

int main(int argc, char** argv) {
  random_bits.seed(static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)));
  std::vector<std::string> supported;
  for (Isa isa : kAllIsas) {
    if (isa_supported(isa)) {
      supported.push_back(isa_name(isa));
    }
  }
  check(supported == std::vector<std::string>(argv + 2, argv + argc), "other instruction sets");
  check(supported.back() == isa_name(current_isa()), "not the best instruction set");
  check_products();
  check_attention();
  std::printf("%s, %d failures\n", isa_name(current_isa()), failures);
  return failures > 0;
}
