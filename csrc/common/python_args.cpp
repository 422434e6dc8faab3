#include "common/python_args.h"

#include "common/errors.h"

namespace mlx_anvil {

void throw_type_error(const char* op, const char* argument, nb::handle value, const char* allowed) {
  const std::string given = nb::cast<std::string>(nb::type_name(value.type()));
  throw nb::type_error(
      op_message(op, std::string(argument) + " is a " + given + "; allowed: " + allowed + ".")
          .c_str());
}

const mx::array& to_array(const char* op,
                          const char* argument,
                          nb::handle value,
                          const char* prefix) {
  mx::array* array = nullptr;
  if (!nb::try_cast(value, array, /*convert=*/false) || !array) {
    throw_type_error(op, (std::string(prefix) + argument).c_str(), value, "mlx.core.array");
  }
  return *array;
}

mx::StreamOrDevice to_stream_or_device(const char* op, nb::handle value) {
  mx::StreamOrDevice stream;
  if (!value.is_none() && !nb::try_cast(value, stream)) {
    throw_type_error(op, "stream", value, "None, mlx.core.Stream, mlx.core.Device");
  }
  return stream;
}

}  // namespace mlx_anvil
