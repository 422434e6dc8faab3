#include "common/checks.h"

#include <sstream>

#include "common/errors.h"
#include "mlx/backend/gpu/device_info.h"

namespace mlx_anvil {

namespace {

bool asks_for_gpu(const mx::StreamOrDevice& stream) {
  struct Visitor {
    // No stream given: MLX uses the default device.
    bool operator()(std::monostate) const { return mx::default_device() == mx::Device::gpu; }
    bool operator()(const mx::Stream& s) const { return s.device == mx::Device::gpu; }
    bool operator()(const mx::ThreadLocalStream& s) const { return s.device == mx::Device::gpu; }
    bool operator()(const mx::Device& d) const { return d == mx::Device::gpu; }
    bool operator()(mx::Device::DeviceType t) const { return t == mx::Device::gpu; }
  };
  return std::visit(Visitor{}, stream);
}

}  // namespace

std::string to_text(const mx::Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string shape_text(const std::string& name, const mx::array& x) {
  return name + " has shape " + to_text(x.shape());
}

std::string to_text(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

bool is_kernel_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

KernelDtype kernel_dtype_of(const mx::array& x) {
  return x.dtype() == mx::float32   ? KernelDtype::kFloat32
         : x.dtype() == mx::float16 ? KernelDtype::kFloat16
                                    : KernelDtype::kBfloat16;
}

void require_kernel_dtypes(const char* op, std::initializer_list<NamedArray> arrays) {
  for (const auto& [name, value] : arrays) {
    if (!is_kernel_dtype(value.dtype())) {
      throw_value_error(op, std::string(name) + " has dtype " + to_text(value.dtype()) +
                                "; allowed: float32, float16, bfloat16.");
    }
  }
}

void require_integers(const char* op, const NamedArray& x) {
  if (!mx::issubdtype(x.value.dtype(), mx::integer)) {
    throw_value_error(op, std::string(x.name) + " has dtype " + to_text(x.value.dtype()) +
                              "; allowed: integers, such as mx.int32.");
  }
}

void require_shape(const char* op,
                   const NamedArray& x,
                   const mx::Shape& allowed,
                   const char* meaning) {
  if (x.value.shape() != allowed) {
    throw_value_error(
        op, shape_text(x.name, x.value) + "; allowed: " + to_text(allowed) + ", " + meaning + ".");
  }
}

void require_inside(const char* op, const char* name, int64_t number, int64_t least, int64_t most) {
  if (number < least || number > most) {
    throw_value_error(op, std::string(name) + " has " + std::to_string(number) + "; allowed: " +
                              std::to_string(least) + " to " + std::to_string(most) + ".");
  }
}

mx::Dtype promoted_dtype(std::initializer_list<NamedArray> arrays) {
  mx::Dtype dtype = arrays.begin()->value.dtype();
  for (const auto& array : arrays) {
    dtype = mx::promote_types(dtype, array.value.dtype());
  }
  return dtype;
}

mx::Shape require_broadcastable(const char* op, std::initializer_list<NamedArray> arrays) {
  mx::Shape shape;
  try {
    for (const auto& array : arrays) {
      shape = mx::broadcast_shapes(shape, array.value.shape());
    }
  } catch (const std::invalid_argument&) {
    std::string given;
    for (const auto& [name, value] : arrays) {
      given +=
          std::string(given.empty() ? "" : " and ") + name + " has shape " + to_text(value.shape());
    }
    throw_value_error(op, given + "; allowed: shapes that broadcast with one another.");
  }
  return shape;
}

mx::Stream require_stream(const char* op, const mx::StreamOrDevice& stream) {
  if (asks_for_gpu(stream) && !mx::gpu::is_available()) {
    throw_value_error(
        op,
        "stream is on the GPU, but the installed MLX has no GPU backend; allowed here: "
        "mx.cpu or a CPU stream.");
  }
  return mx::to_stream(stream);
}

}  // namespace mlx_anvil
