#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "common/bind_op.h"
#include "common/python_args.h"
#include "flash_attention/plan.h"
#include "flash_attention/python_lengths.h"

namespace mlx_anvil {

using namespace nb::literals;

namespace {

std::optional<int> to_optional_int(const char* name, nb::handle value) {
  return value.is_none() ? std::nullopt
                         : std::optional(to_int32(kAttentionPlan, name, value, "None, or an int"));
}

std::shared_ptr<AttentionPlan> plan_of_python(nb::handle q_len,
                                              nb::handle kv_len,
                                              nb::handle lengths,
                                              nb::handle q_lengths,
                                              nb::handle starts,
                                              nb::handle cu_seqlens_q,
                                              nb::handle cu_seqlens_k,
                                              nb::handle block_table,
                                              nb::handle page_size,
                                              nb::handle stream) {
  return attention_plan(
      to_int32(kAttentionPlan, "q_len", q_len), to_optional_int("kv_len", kv_len),
      to_lengths(kAttentionPlan, lengths, q_lengths, starts, cu_seqlens_q, cu_seqlens_k),
      to_optional_array(kAttentionPlan, "block_table", block_table),
      to_optional_int("page_size", page_size), to_stream_or_device(kAttentionPlan, stream));
}

std::string text_of(const AttentionPlan& plan) {
  return "AttentionPlan(batch=" + std::to_string(plan.batch) +
         ", q_len=" + std::to_string(plan.q_len) + ", kv_len=" + std::to_string(plan.kv_len) + ")";
}

const BindOp bind_attention_plan([](nb::module_& m) {
  nb::class_<AttentionPlan>(
      m, "AttentionPlan",
      "What flash_attention derives from lengths and pages: made by attention_plan.")
      .def_ro("batch", &AttentionPlan::batch, "Of the queries.")
      .def_ro("q_len", &AttentionPlan::q_len, "The length of the queries.")
      .def_ro("kv_len", &AttentionPlan::kv_len, "The length of the keys.")
      .def("__repr__", text_of);
  m.def("_attention_plan", plan_of_python, "q_len"_a.none(), "kv_len"_a.none(), "lengths"_a.none(),
        "q_lengths"_a.none(), "starts"_a.none(), "cu_seqlens_q"_a.none(), "cu_seqlens_k"_a.none(),
        "block_table"_a.none(), "page_size"_a.none(), "stream"_a.none(),
        nb::sig("def _attention_plan(q_len: int, kv_len: int | None, lengths: mlx.core.array | "
                "None, q_lengths: mlx.core.array | None, starts: mlx.core.array | None, "
                "cu_seqlens_q: mlx.core.array | None, "
                "cu_seqlens_k: mlx.core.array | None, block_table: mlx.core.array | None, "
                "page_size: int | None, stream: " MLX_ANVIL_STREAM_TYPE ") -> AttentionPlan"));
});

}  // namespace

}  // namespace mlx_anvil
