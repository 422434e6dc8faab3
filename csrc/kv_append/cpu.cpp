// CPU driver of kv_append: tokens over threads, scratch for rotated rows.
#include "kv_append/cpu.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_set>

#include "common/integers.h"
#include "common/parallel.h"
#include "common/thread_scratch.h"
#include "kv_append/simd/kernels.h"
#include "rope/simd/kernels.h"

namespace mlx_anvil {

namespace {

// Minimum elements per thread.
constexpr int64_t kGrain = 16384;

template <class Bits>
void gather_columns(const void* from, int64_t step, int64_t count, void* to) {
  for (int64_t i = 0; i < count; ++i) {
    static_cast<Bits*>(to)[i] = static_cast<const Bits*>(from)[i * step];
  }
}

void gather_row(const KvAppendTensor& tensor, const void* from, void* to) {
  const int64_t step = tensor.strides[3];
  if (step == 1) {
    std::memcpy(to, from, static_cast<size_t>(tensor.columns * tensor.itemsize));
  } else if (tensor.itemsize == 4) {
    gather_columns<uint32_t>(from, step, tensor.columns, to);
  } else if (tensor.itemsize == 2) {
    gather_columns<uint16_t>(from, step, tensor.columns, to);
  } else {
    gather_columns<uint8_t>(from, step, tensor.columns, to);
  }
}

class AppendCall {
 public:
  explicit AppendCall(const KvAppendArgs& args)
      : args_(args), rows_of_batch_(args.pages / args.batch * args.page_size) {
    if (args.rope.pairs > 0) {
      frequencies_.emplace(args.rope, args.freqs, args.dtype);
    }
    if (!args.distinct) {
      keep_last_tokens();
    }
  }

  void run() const {
    int64_t columns = 0;
    for (const KvAppendTensor& tensor : args_.tensors) {
      columns += tensor.columns;
    }
    const int64_t grain = ceil_div(kGrain, std::max<int64_t>(1, columns * args_.heads));
    parallel_for(args_.batch * args_.length, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t row = row_of(token / args_.length, token % args_.length);
        if (row >= 0 && row < rows_of_batch_ && (args_.distinct || is_last_[token])) {
          write(token, row);
        }
      }
    });
  }

 private:
  int64_t row_of(int64_t batch, int64_t token) const {
    return static_cast<int64_t>(args_.rows.at(batch, token));
  }

  // Marks the last token of each row.
  void keep_last_tokens() {
    is_last_.resize(static_cast<size_t>(args_.batch * args_.length));
    std::unordered_set<int64_t> seen;
    for (int64_t b = 0; b < args_.batch; ++b) {
      seen.clear();
      for (int64_t t = args_.length - 1; t >= 0; --t) {
        is_last_[b * args_.length + t] = seen.insert(row_of(b, t)).second;
      }
    }
  }

  void write(int64_t token, int64_t row) const {
    const int64_t batch = token / args_.length, position = token % args_.length;
    const int64_t page = batch * (args_.pages / args_.batch) + row / args_.page_size;
    for (const KvAppendTensor& tensor : args_.tensors) {
      const char* const in =
          static_cast<const char*>(tensor.in) +
          (batch * tensor.strides[0] + position * tensor.strides[2]) * tensor.itemsize;
      // The row of head 0 among the caches' rows; the next head's is a page further on.
      const int64_t out = page * args_.heads * args_.page_size + row % args_.page_size;
      tensor.rotates ? rotate(tensor, in, out, batch, position) : store(tensor, in, out);
    }
  }

  void store(const KvAppendTensor& tensor, const char* in, int64_t out) const {
    const int64_t bytes = tensor.columns * tensor.itemsize;
    for (int64_t head = 0; head < args_.heads; ++head, out += args_.page_size) {
      const char* const from = in + head * tensor.strides[1] * tensor.itemsize;
      if (tensor.bits == 0) {
        gather_row(tensor, from, static_cast<char*>(tensor.out[0]) + out * bytes);
        continue;
      }
      const void* dense = from;
      if (tensor.strides[3] != 1) {
        void* const gathered = thread_scratch(bytes);
        gather_row(tensor, from, gathered);
        dense = gathered;
      }
      quantize(tensor, dense, out);
    }
  }

  void rotate(const KvAppendTensor& tensor,
              const char* in,
              int64_t out,
              int64_t batch,
              int64_t position) const {
    const int64_t padded = frequencies_->padded(), bytes = tensor.columns * tensor.itemsize;
    const int64_t table_bytes = 2 * padded * static_cast<int64_t>(sizeof(float));
    char* const scratch = static_cast<char*>(
        thread_scratch(table_bytes + (tensor.bits == 0 ? 0 : args_.heads * bytes)));
    auto* const table = reinterpret_cast<float*>(scratch);
    const RopeKernels& kernels = rope_kernels();
    kernels.angles({frequencies_->turns.data(), frequencies_->defects.data(), padded,
                    args_.positions.at(batch, position), 1, args_.rope.inverse},
                   table);
    char* const rotated = scratch + table_bytes;
    const bool direct = tensor.bits == 0;
    const RopeRows rows = {in,
                           direct ? static_cast<char*>(tensor.out[0]) + out * bytes : rotated,
                           1,
                           args_.heads,
                           tensor.strides[1],
                           tensor.strides[2],
                           tensor.strides[3],
                           direct ? args_.page_size * tensor.columns : tensor.columns,
                           tensor.columns,
                           args_.rope.pairs,
                           args_.rope.traditional,
                           /*stream=*/false,
                           table,
                           padded};
    args_.dtype == mx::float32   ? kernels.rotate_float32(rows)
    : args_.dtype == mx::float16 ? kernels.rotate_float16(rows)
                                 : kernels.rotate_bfloat16(rows);
    for (int64_t head = 0; !direct && head < args_.heads; ++head) {
      quantize(tensor, rotated + head * bytes, out + head * args_.page_size);
    }
  }

  void quantize(const KvAppendTensor& tensor, const void* x, int64_t out) const {
    const int64_t groups = tensor.columns / args_.group;
    const auto scale_at = [&](int part) {
      return static_cast<char*>(tensor.out[part]) + out * groups * tensor.itemsize;
    };
    const QuantizeRow row = {
        x,
        tensor.columns,
        args_.group,
        tensor.bits,
        static_cast<uint8_t*>(tensor.out[0]) + out * (tensor.columns * tensor.bits / 8),
        scale_at(1),
        scale_at(2)};
    const KvAppendKernels& kernels = kv_append_kernels();
    args_.dtype == mx::float32   ? kernels.quantize_float32(row)
    : args_.dtype == mx::float16 ? kernels.quantize_float16(row)
                                 : kernels.quantize_bfloat16(row);
  }

  const KvAppendArgs& args_;
  const int64_t rows_of_batch_;
  std::optional<PaddedFrequencies> frequencies_;
  std::vector<bool> is_last_;
};

}  // namespace

void kv_append_cpu(const KvAppendArgs& args) {
  for (const RopeCopy& copy : args.copies) {
    copy_on_cpu(copy);
  }
  if (args.batch > 0 && args.length > 0 && args.heads > 0 && args.page_size > 0) {
    AppendCall(args).run();
  }
}

}  // namespace mlx_anvil
