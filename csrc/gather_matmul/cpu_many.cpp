// Quantized experts: many rows of each by GEMM. One loop over all pieces packs x, one over all
// their tiles multiplies, so that a small expert costs no fork and join of its own.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "gather_matmul/cpu_support.h"
#include "quantized_matmul/large_rows.h"

namespace mlx_anvil {

namespace {

// Rows of x that are packed at a time. They and their products are all the memory of a call.
constexpr int64_t kBatchRows = 4096;
constexpr int64_t kPackGrain = 4;  // minimum rows per thread when packing
constexpr int64_t kTileColumns = 128;

// One piece of a batch.
struct Part {
  GatherPiece piece;
  int64_t first_row;  // in the batch, counting packed rows
  int64_t packed_rows;
  Floats x, packed;
  std::vector<uint8_t> finite;
  Floats products[2];
  void* product;                    // of the first matrix: products[0] or the result itself
  std::atomic<bool> alone = false;  // has numbers that the packed form has not

  Part(const GatherPiece& of, int64_t first, int64_t packed)
      : piece(of), first_row(first), packed_rows(packed), finite(of.count, 1) {}
};

class Batch {
 public:
  Batch(const GatherCall& call, const GatherPiece* begin, const GatherPiece* end)
      : call_(call),
        kernels_(quantized_cpu_kernels()),
        gemm_(call.transposed() ? kernels_.int_gemm : kernels_.int_plain_gemm),
        view_(call.matrix(0, 0)),
        values_(unit_values(call.format.bits)),
        block_(int64_t{values_} * kernels_.lanes),
        int_tile_(gemm_.columns(view_)) {
    if (int_tile_ > 0) {
      unit_ = 1;
      tile_ = int_tile_;
    } else {  // tiles in units of columns (transposed) or blocks (plain)
      unit_ = call.transposed() ? 1 : block_;
      tile_ = std::max<int64_t>(1, kTileColumns / unit_);
    }
    tiles_ = ceil_div(ceil_div(call.out_columns(), unit_), tile_);
    for (const GatherPiece* piece = begin; piece != end; ++piece) {
      const int64_t packed =
          int_tile_ > 0 ? piece->count : round_up(piece->count, kernels_.tile_rows);
      parts_.push_back(std::make_unique<Part>(*piece, rows_, packed));
      prepare(*parts_.back());
      rows_ += packed;
    }
  }

  void run() {
    parallel_for(rows_, kPackGrain, [&](int64_t begin, int64_t end) { pack(begin, end); });
    parallel_for(static_cast<int64_t>(parts_.size()) * tiles_, 1,
                 [&](int64_t begin, int64_t end) { multiply(begin, end); });
    for (const auto& part : parts_) {
      if (part->alone || std::count(part->finite.begin(), part->finite.end(), 0) > 0) {
        multiply_alone(call_, part->piece);
      }
    }
  }

 private:
  void prepare(Part& part) {
    const int64_t count = part.piece.count;
    part.x = bytes(count * call_.x_bytes());
    part.packed = int_tile_ > 0 ? bytes(gemm_.packed_bytes(view_, count))
                                : floats(part.packed_rows * padded_columns());
    const bool in_place = !call_.gated && call_.rows.is_run(part.piece);
    for (int which = 0; which < call_.matrices() && !in_place; ++which) {
      part.products[which] = bytes(count * call_.out_bytes());
    }
    part.product = in_place ? call_.out_row(part.piece, 0) : part.products[0].get();
  }

  int64_t padded_columns() const {
    return round_up(call_.x_columns(), call_.transposed() ? block_ : kernels_.panel);
  }

  LaneRows panels(const Part& part) const {
    return {part.packed.get(), kernels_.panel, part.packed_rows * kernels_.panel};
  }

  // Rows [begin, end) of the batch.
  void pack(int64_t begin, int64_t end) {
    for (const auto& part : parts_) {
      const int64_t first = std::max<int64_t>(0, begin - part->first_row);
      const int64_t last = std::min(part->packed_rows, end - part->first_row);
      if (first < last) {
        pack_rows(*part, first, last);
      }
    }
  }

  void pack_rows(Part& part, int64_t first, int64_t last) {
    const int64_t row_bytes = call_.x_bytes(), given = std::min(last, part.piece.count);
    for (int64_t m = first; m < given; ++m) {
      void* const row = at(part.x.get(), m * row_bytes);
      std::memcpy(row, at(call_.x, call_.rows.rows[part.piece.begin + m].x * row_bytes), row_bytes);
      if (divisor_of_row(call_.dtype, row, call_.x_columns()) != 1.0f) {
        part.alone = true;
      }
    }
    if (int_tile_ > 0) {
      gemm_.pack({view_, part.x.get(), part.piece.count, first, last - first, part.packed.get(),
                  part.finite.data()});
      return;
    }
    const LaneRows to = panels(part);
    for (int64_t m = first; m < last; ++m) {  // padding rows are multiplied, and discarded
      const bool is_given = m < part.piece.count;
      kernels_.load_row(call_.dtype, at(part.x.get(), is_given ? m * row_bytes : 0),
                        is_given ? call_.x_columns() : 0, call_.transposed() ? values_ : 1,
                        padded_columns() / kernels_.lanes, to.data + m * to.row_step, to.pair_step);
    }
  }

  // Tiles [begin, end) of all parts.
  void multiply(int64_t begin, int64_t end) {
    while (begin < end) {
      Part& part = *parts_[begin / tiles_];
      const int64_t first = begin % tiles_;
      const int64_t count = std::min(end - begin, tiles_ - first);
      begin += count;
      if (part.alone) {
        continue;
      }
      multiply_tiles(part, 0, first, count, part.product);
      if (call_.gated) {
        multiply_tiles(part, 1, first, count, part.products[1].get());
      }
      const int64_t column = first * tile_ * unit_;
      const int64_t columns = std::min(count * tile_ * unit_, call_.out_columns() - column);
      if (part.products[0]) {
        finish_columns(call_, part.piece, column, columns, part.products[0].get(),
                       part.products[1].get());
      }
    }
  }

  void multiply_tiles(Part& part, int which, int64_t first, int64_t count, void* out) {
    const QuantizedMatrixView matrix = call_.matrix(which, part.piece.expert);
    const int64_t rows = part.piece.count;
    if (int_tile_ > 0) {
      const Floats scratch = bytes(gemm_.scratch(matrix, rows));
      const int64_t column = first * tile_;
      if (!gemm_.multiply({matrix, column, std::min(count * tile_, call_.out_columns() - column),
                           rows, part.packed.get(), out, scratch.get()})) {
        part.alone = true;
      }
      return;
    }
    const int64_t items = ceil_div(call_.out_columns(), unit_);
    const Floats scratch = floats(kernels_.gemm_scratch(matrix, call_.product, tile_, rows));
    for (int64_t t = first; t < first + count; ++t) {
      kernels_.gemm({matrix, call_.product, t * tile_, std::min(tile_, items - t * tile_), rows,
                     panels(part), out, scratch.get()});
    }
  }

  const GatherCall& call_;
  const QuantizedCpuKernels& kernels_;
  const QuantizedIntGemm& gemm_;
  const QuantizedMatrixView view_;
  const int values_;
  const int64_t block_, int_tile_;
  int64_t unit_, tile_, tiles_;
  int64_t rows_ = 0;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace

void finish_columns(const GatherCall& call,
                    const GatherPiece& piece,
                    int64_t first,
                    int64_t count,
                    const void* product,
                    const void* up) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const int64_t size = element_size(call.dtype), row_bytes = call.out_bytes();
  if (!call.gated) {
    for (int64_t m = 0; m < piece.count; ++m) {
      std::memcpy(at(call.out_row(piece, m), first * size),
                  at(product, m * row_bytes + first * size), count * size);
    }
    return;
  }
  const int64_t padded = round_up(count, 2 * kernels.lanes);
  const Floats gates = floats(padded), ups = floats(padded);
  const auto load = [&](const void* from, int which, int64_t m, float* to) {
    kernels.load_row(call.dtype, at(from, m * row_bytes + first * size), count, 1,
                     padded / kernels.lanes, to, 2 * kernels.lanes);
    call.add_bias(which, piece.expert, first, count, 1, to);
  };
  for (int64_t m = 0; m < piece.count; ++m) {
    load(product, 0, m, gates.get());
    load(up, 1, m, ups.get());
    kernels.gate(call.options, gates.get(), ups.get(), count);
    kernels.store_dense(call.dtype, gates.get(), count, at(call.out_row(piece, m), first * size));
  }
}

void multiply_many_rows(const GatherCall& call, const std::vector<GatherPiece>& pieces) {
  size_t begin = 0;
  while (begin < pieces.size()) {
    size_t end = begin;
    for (int64_t rows = 0; end < pieces.size() && rows < kBatchRows; ++end) {
      rows += pieces[end].count;
    }
    Batch(call, pieces.data() + begin, pieces.data() + end).run();
    begin = end;
  }
}

}  // namespace mlx_anvil
