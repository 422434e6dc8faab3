// Quantized layers of one module that a model calls with the same x, such as the projections of q,
// k and v: one node computes the products of all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Learns which layers are called with the same array, one after another. From then on, the first of
// them that gets a new x computes the products of all, and the others take theirs. What they do not
// take is dropped at the next call of the thread, and the layers learn again. Callers hold Python's
// lock.
class SharedInput {
 public:
  static constexpr size_t kMostLayers = 32;
  // Reads the matrix of a layer, which may have changed since the last call; none if it is gone.
  using MatrixOf = std::function<std::optional<QuantizedMatrix>(size_t)>;

  SharedInput(const QuantizedFormat& format, size_t layers);

  // The product of a layer, or none if quantized_matmul() has to compute it. `own` is the layer's
  // matrix.
  std::optional<mx::array> multiply(size_t layer,
                                    const mx::array& x,
                                    const QuantizedMatrix& own,
                                    const MatrixOf& matrix_of,
                                    mx::Stream s);

 private:
  using Layers = uint32_t;  // a set: one bit for each
  struct Product {
    QuantizedMatrix matrix;
    mx::array out;
  };
  struct Products {
    mx::array x;
    mx::Stream stream;
    std::map<size_t, Product> of;  // the layers that have not taken theirs
  };

  // A run of calls with one x.
  struct Run {
    mx::array x;
    std::thread::id thread;
    Layers layers = 0;
  };

  bool is_learning(size_t layer) const;
  void learn(size_t layer, const mx::array& x);
  void finish_run();
  void forget(size_t layer);
  std::optional<mx::array> take(size_t layer,
                                const mx::array& x,
                                const QuantizedMatrix& own,
                                mx::Stream s);
  std::optional<std::vector<QuantizedMatrix>> matrices_of(const std::vector<size_t>& layers,
                                                          size_t layer,
                                                          const mx::array& x,
                                                          const QuantizedMatrix& own,
                                                          const MatrixOf& matrix_of) const;

  const QuantizedFormat format_;
  std::vector<Layers> together_;  // for each layer, those that get the same x; 0: not known
  std::vector<int> alone_;        // for each layer, how many runs it was alone in
  std::optional<Run> run_;        // while a layer learns
  int dropped_ = 0;               // how often products were computed in vain
  std::map<std::thread::id, Products> waiting_;
};

}  // namespace mlx_anvil
