// Runs the kernel of kernel.metal without Python, and prints "ok" where its results are right.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "abi.h"

const mslc_kernel* mslc_kernels(unsigned int* count);

enum { THREADS = 96, GROUPS = 5 };

static int run_once(const mslc_kernel* kernel, unsigned long long seed) {
  static float in[GROUPS][THREADS], out[GROUPS][THREADS];
  for (int g = 0; g < GROUPS; ++g)
    for (int t = 0; t < THREADS; ++t) in[g][t] = (float)((g * 37 + t * 11) % 64) / 8;
  memset(out, 0, sizeof out);
  mslc_buffer buffers[2] = {{in, sizeof in}, {out, sizeof out}};
  unsigned int lengths[1] = {THREADS * sizeof(float)};
  mslc_launch launch = {.struct_size = sizeof launch, .kernel = kernel, .buffers = buffers};
  launch.buffer_count = 2;
  launch.threadgroup_buffer_count = 1;
  launch.threadgroup_lengths = lengths;
  launch.grid = (mslc_size){GROUPS, 1, 1};
  launch.threadgroup_size = (mslc_size){THREADS, 1, 1};
  launch.seed = seed;
  launch.threads = 2;
  launch.step_limit = 100000;
  mslc_report report = {.struct_size = sizeof report};
  const int failed = mslc_run(&launch, &report);
  for (unsigned int i = 0; i < report.finding_count; ++i)
    printf("%s\n", report.findings[i].message);
  mslc_report_clear(&report);
  if (failed) return 1;
  for (int g = 0; g < GROUPS; ++g)
    for (int t = 0; t < THREADS; ++t) {
      float sum = 0;
      for (int lane = 0; lane < 32; ++lane) sum += in[g][t / 32 * 32 + lane];
      // The 8x8 product of a matrix of ones and the identity is 1 everywhere.
      const float expected = in[g][THREADS - 1 - t] + sum + expf(in[g][t]) + 1;
      if (fabsf(out[g][t] - expected) > 1e-5f * fabsf(expected)) {
        printf("threadgroup %d, thread %d: %g, expected %g\n", g, t, out[g][t], expected);
        return 1;
      }
    }
  return 0;
}

int main(void) {
  unsigned int count;
  const mslc_kernel* kernels = mslc_kernels(&count);
  if (count != 1 || strcmp(kernels[0].name, "mixed")) return 1;
  for (unsigned long long seed = 0; seed < 4; ++seed)
    if (run_once(&kernels[0], seed)) return 1;
  puts("ok");
  return 0;
}
