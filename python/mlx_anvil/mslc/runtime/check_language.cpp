// Turns errors that the compiler, the shim and the scheduler detect into findings: array indices
// out of range, and SIMD-group operations that need lanes which do not take part.
#include <stdio.h>

#include "compiler_checks.h"
#include "division.h"
#include "worker.h"

using mslc::OutOfBounds;
using mslc::Overflow;
using mslc::TypeDescriptor;

namespace {

long long as_signed(const TypeDescriptor& type, uintptr_t value) {
  const unsigned bits = 1u << (type.info >> 1);
  if (!(type.info & 1) || bits >= 64) return static_cast<long long>(value);
  const unsigned unused = 64 - bits;
  return static_cast<long long>(static_cast<uint64_t>(value) << unused) >> unused;
}

}  // namespace

namespace mslc {

void Worker::report_lonely_barrier(const mslc_lanes& lanes, const Thread& first) {
  mslc_finding divergence = finding(MSLC_FINDING_COLLECTIVE_DIVERGENCE, first.site, first.pc);
  divergence.thread_index = static_cast<int>(first.descriptor.index);
  snprintf(
      divergence.message, sizeof divergence.message,
      "simdgroup_barrier divergence: only lanes %08x (hexadecimal mask) of the SIMD group reach it",
      lanes.active);
  report(divergence);
}

}  // namespace mslc

extern "C" {

MSLC_API void mslc_undefined_result(const mslc_lanes* lanes, unsigned int lane, const char* what) {
  mslc::Worker& worker = *mslc::Worker::current();
  if (!worker.launch().sink) return;
  mslc_finding divergence =
      worker.finding(MSLC_FINDING_COLLECTIVE_DIVERGENCE, lanes->site, nullptr);
  const unsigned group = worker.running_group() * MSLC_SIMD_WIDTH;
  divergence.thread_index = static_cast<int>(group + lane);
  snprintf(divergence.message, sizeof divergence.message,
           "%s (active lanes: %08x as a hexadecimal mask)", what, lanes->active);
  worker.report(divergence);
}

MSLC_API void mslc_beyond_tensor(const mslc_lanes* lanes, unsigned int lane) {
  mslc::Worker& worker = *mslc::Worker::current();
  if (!worker.launch().sink) return;
  mslc_finding finding = worker.finding(MSLC_FINDING_ARRAY_BOUNDS, lanes->site, nullptr);
  finding.thread_index = static_cast<int>(worker.running_group() * MSLC_SIMD_WIDTH + lane);
  snprintf(finding.message, sizeof finding.message,
           "a slice with static extents reaches beyond the extents of its tensor");
  worker.report(finding);
}

MSLC_API void mslc_no_element(unsigned int index, unsigned int count) {
  mslc::Worker& worker = *mslc::Worker::current();
  mslc_finding finding =
      worker.finding(MSLC_FINDING_ARRAY_BOUNDS, nullptr, __builtin_return_address(0));
  snprintf(finding.message, sizeof finding.message,
           "element %u of a cooperative tensor that has %u elements in each lane", index, count);
  worker.stop(finding);
}

MSLC_API void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, uintptr_t index) {
  mslc::Worker& worker = *mslc::Worker::current();
  const mslc_site site = {data->location.file, nullptr, data->location.line, data->location.column};
  mslc_finding finding = worker.finding(MSLC_FINDING_ARRAY_BOUNDS, &site, nullptr);
  snprintf(finding.message, sizeof finding.message, "index %lld is outside an array of type %s",
           as_signed(*data->index, index), data->array->name);
  worker.stop(finding);
}

// Called before a division by zero. The kernel then continues, as on a GPU.
MSLC_API void __ubsan_handle_divrem_overflow(const Overflow* data, uintptr_t, uintptr_t) {
  mslc::Worker& worker = *mslc::Worker::current();
  const mslc_site site = {data->location.file, nullptr, data->location.line, data->location.column};
  mslc_finding finding = worker.finding(MSLC_FINDING_ARITHMETIC, &site, nullptr);
  snprintf(finding.message, sizeof finding.message, "%s", mslc::kNoQuotient);
  worker.report(finding);
}

MSLC_API void __ubsan_handle_local_out_of_bounds_abort() {
  mslc::Worker& worker = *mslc::Worker::current();
  mslc_finding finding =
      worker.finding(MSLC_FINDING_ARRAY_BOUNDS, nullptr, __builtin_return_address(0));
  snprintf(finding.message, sizeof finding.message, "access outside a variable of the thread");
  worker.stop(finding);
}
}
