// Attention and its gradients, against float64. The bfloat16 kernels multiply bfloat16 where the
// processor does.
#include <algorithm>
#include <cstdlib>

#include "driver.h"
#include "flash_attention/cpu.h"

namespace {

struct Numbers {
  KernelDtype dtype;
  std::vector<char> bytes;
  int64_t rows, columns;  // rows of all heads

  Numbers(KernelDtype type, int64_t heads, int64_t length, int64_t dim)
      : dtype(type), rows(heads * length), columns(dim) {
    std::vector<float> numbers(rows * columns);
    for (float& number : numbers) {
      number = uniform(-2, 2);
    }
    bytes = stored(type, numbers);
  }

  double at(int64_t row, int64_t column) const {
    return loaded(dtype, bytes, row * columns + column);
  }
  AttentionView view(int64_t length) const {
    return {bytes.data(), {rows * columns, length * columns, columns, 1}};
  }
  AttentionOutput output(int64_t length) {
    return {bytes.data(), {rows * columns, length * columns, columns, 1}};
  }
};

// A sum and the sum of its terms' magnitudes.
struct Sum {
  double value = 0, size = 0;
  void add(double term) {
    value += term;
    size += std::abs(term);
  }
};

struct Case {
  KernelDtype dtype;
  int64_t heads, q_len, kv_len, dim, v_dim;
  bool causal;

  std::string name() const {
    constexpr const char* kDtypes[] = {"float32", "float16", "bfloat16"};
    return std::string("attention ") + kDtypes[static_cast<int>(dtype)] + ", " +
           std::to_string(q_len) + " queries, " + std::to_string(kv_len) + " keys, " +
           std::to_string(dim) + " and " + std::to_string(v_dim) + (causal ? ", causal" : "");
  }
};

class Worst {
 public:
  explicit Worst(double allowed) : allowed_(allowed) {}
  void add(double got, const Sum& want) {
    const double error = std::abs(got - want.value);
    const double share = error / (allowed_ * want.size + 1e-7);  // 1e-7: float16's subnormals
    worst_ = std::isnan(error) ? INFINITY : std::max(worst_, share);
  }
  void check_all(const std::string& name) const {
    char text[60];
    std::snprintf(text, sizeof(text), ": %.3g of the allowed error", worst_);
    check(worst_ <= 1, name + text);
    if (std::getenv("VERBOSE")) {
      std::printf("%s%s\n", name.c_str(), text);
    }
  }

 private:
  double allowed_, worst_ = 0;
};

void compare(const Case& c) {
  Numbers q(c.dtype, c.heads, c.q_len, c.dim), k(c.dtype, c.heads, c.kv_len, c.dim);
  Numbers v(c.dtype, c.heads, c.kv_len, c.v_dim), out(c.dtype, c.heads, c.q_len, c.v_dim);
  Numbers d_out(c.dtype, c.heads, c.q_len, c.v_dim);
  Numbers d_q = q, d_k = k, d_v = v;
  std::vector<float> lse(c.heads * c.q_len);

  AttentionBackwardArgs backward{};
  backward.dtype = c.dtype;
  backward.config.scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
  backward.config.window_right = c.causal ? 0 : kUnboundedWindow;
  backward.sizes = {1, c.heads, c.heads, c.q_len, c.kv_len, c.dim, c.v_dim};
  backward.q = q.view(c.q_len);
  backward.k = k.view(c.kv_len);
  backward.v = v.view(c.kv_len);
  AttentionForwardArgs forward{};
  static_cast<AttentionOperands&>(forward) = backward;
  forward.out = out.output(c.q_len);
  forward.lse = lse.data();
  forward.lse_stride = c.q_len;
  attention_forward_cpu(forward);
  backward.out = out.view(c.q_len);
  backward.d_out = d_out.view(c.q_len);
  backward.lse = lse.data();
  backward.lse_stride = c.q_len;
  backward.d_q = d_q.output(c.q_len);
  backward.d_k = d_k.output(c.kv_len);
  backward.d_v = d_v.output(c.kv_len);
  attention_backward_cpu(backward);

  // Roundings to the dtype: of probabilities or their gradients, and of the result.
  const double unit = c.dtype == KernelDtype::kFloat32   ? 4e-6
                      : c.dtype == KernelDtype::kFloat16 ? 0x1p-10
                                                         : 0x1p-7;
  Worst of_out(unit), of_q(2 * unit), of_k(2 * unit), of_v(unit);
  const double scale = backward.config.scale;
  for (int64_t head = 0; head < c.heads; ++head) {
    std::vector<double> p(c.q_len * c.kv_len), d_s(c.q_len * c.kv_len), sizes(c.q_len * c.kv_len);
    for (int64_t i = 0; i < c.q_len; ++i) {
      const int64_t row = head * c.q_len + i;
      const int64_t last = c.causal ? i + c.kv_len - c.q_len : c.kv_len - 1;
      double* const of_row = &p[i * c.kv_len];
      double total = 0, largest = -INFINITY;
      for (int64_t j = 0; j <= last; ++j) {
        for (int64_t d = 0; d < c.dim; ++d) {
          of_row[j] += q.at(row, d) * k.at(head * c.kv_len + j, d) * scale;
        }
        largest = std::max(largest, of_row[j]);
      }
      for (int64_t j = 0; j <= last; ++j) {
        total += of_row[j] = std::exp(of_row[j] - largest);
      }
      Sum mean;  // of the gradients of p
      std::vector<double> d_p(c.kv_len);
      for (int64_t j = 0; j <= last; ++j) {
        of_row[j] /= total;
        for (int64_t d = 0; d < c.v_dim; ++d) {
          d_p[j] += d_out.at(row, d) * v.at(head * c.kv_len + j, d);
        }
        mean.add(of_row[j] * d_p[j]);
      }
      for (int64_t j = 0; j <= last; ++j) {
        d_s[i * c.kv_len + j] = of_row[j] * (d_p[j] - mean.value);
        sizes[i * c.kv_len + j] = of_row[j] * (std::abs(d_p[j]) + mean.size);
      }
      for (int64_t d = 0; d < c.v_dim; ++d) {
        Sum sum;
        for (int64_t j = 0; j <= last; ++j) {
          sum.add(of_row[j] * v.at(head * c.kv_len + j, d));
        }
        of_out.add(out.at(row, d), sum);
      }
      for (int64_t d = 0; d < c.dim; ++d) {
        Sum sum;
        for (int64_t j = 0; j <= last; ++j) {
          sum.value += d_s[i * c.kv_len + j] * k.at(head * c.kv_len + j, d) * scale;
          sum.size += sizes[i * c.kv_len + j] * std::abs(k.at(head * c.kv_len + j, d)) * scale;
        }
        of_q.add(d_q.at(row, d), sum);
      }
    }
    for (int64_t j = 0; j < c.kv_len; ++j) {
      const int64_t row = head * c.kv_len + j;
      for (int64_t d = 0; d < c.dim; ++d) {
        Sum sum;
        for (int64_t i = 0; i < c.q_len; ++i) {
          sum.value += d_s[i * c.kv_len + j] * q.at(head * c.q_len + i, d) * scale;
          sum.size += sizes[i * c.kv_len + j] * std::abs(q.at(head * c.q_len + i, d)) * scale;
        }
        of_k.add(d_k.at(row, d), sum);
      }
      for (int64_t d = 0; d < c.v_dim; ++d) {
        Sum sum;
        for (int64_t i = 0; i < c.q_len; ++i) {
          sum.add(p[i * c.kv_len + j] * d_out.at(head * c.q_len + i, d));
        }
        of_v.add(d_v.at(row, d), sum);
      }
    }
  }
  of_out.check_all(c.name());
  of_q.check_all(c.name() + ", gradient in q");
  of_k.check_all(c.name() + ", gradient in k");
  of_v.check_all(c.name() + ", gradient in v");
}

}  // namespace

void check_attention() {
  for (KernelDtype dtype : {KernelDtype::kFloat32, KernelDtype::kFloat16, KernelDtype::kBfloat16}) {
    for (bool causal : {false, true}) {
      const auto between = [](int64_t low, int64_t high) {
        return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1));
      };
      const int64_t q_len = between(1, 90);
      compare({dtype, 2, q_len, q_len + between(0, 60), between(1, 80), between(1, 80), causal});
      compare({dtype, 1, between(1, 8), between(80, 300), 64, 64, causal});
    }
  }
}
