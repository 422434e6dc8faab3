#include "common/kernel_name.h"

namespace mlx_anvil {

std::vector<FunctionConstant> FunctionConstants::list() const {
  std::vector<FunctionConstant> constants;
  for (uint32_t index = 0; index < 32; ++index) {
    if (given_ >> index & 1) {
      constants.push_back({index, (values_ >> index & 1) != 0});
    }
  }
  return constants;
}

std::string KernelName::text() const {
  std::string text;
  for (const Piece& piece : pieces_) {
    text += piece.text();
  }
  return text;
}

size_t KernelName::hash() const {
  size_t hash = 0;
  for (const Piece& piece : pieces_) {
    hash = hash * 31 + piece.hash();
  }
  return hash;
}

}  // namespace mlx_anvil
