// The scoring functions of softmax_topk. Plain data: kernel files include it.
#pragma once

namespace mlx_anvil {

enum class RouterScoring { kSoftmax, kSigmoid, kSqrtSoftplus };

}  // namespace mlx_anvil
