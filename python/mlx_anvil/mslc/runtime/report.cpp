#include "report.h"

#include <stdlib.h>
#include <string.h>

namespace mslc {
namespace {

constexpr unsigned kMaxFindings = 1000;

bool same_place(const mslc_finding& a, const mslc_finding& b) {
  return a.kind == b.kind && a.pc == b.pc && a.file == b.file && a.line == b.line &&
         a.column == b.column && a.buffer == b.buffer;
}

}  // namespace

void Findings::add(const mslc_finding& finding) {
  pthread_mutex_lock(&mutex_);
  mslc_report& report = *report_;
  unsigned i = 0;
  while (i < report.finding_count && !same_place(report.findings[i], finding)) ++i;
  if (i < report.finding_count) {
    ++report.findings[i].count;
  } else if (i < kMaxFindings) {
    if (i == report.finding_capacity) {
      report.finding_capacity = i ? 2 * i : 16;
      report.findings = static_cast<mslc_finding*>(
          realloc(report.findings, sizeof(mslc_finding) * report.finding_capacity));
      if (!report.findings) abort();
    }
    report.findings[report.finding_count++] = finding;
  }
  pthread_mutex_unlock(&mutex_);
}

}  // namespace mslc

extern "C" void mslc_report_clear(mslc_report* report) {
  free(report->findings);
  unsigned size = report->struct_size;
  memset(report, 0, size);
  report->struct_size = size;
}
