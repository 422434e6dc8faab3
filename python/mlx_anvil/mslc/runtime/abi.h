// The C interface of the Metal simulator. Three sides share it: the kernels that mslc compiles, the
// runtime that schedules them, and the host that launches them (Python through ctypes, the C++
// extension through dlopen). Kernels are compiled without headers, so it includes nothing.
#ifndef MSLC_ABI_H_
#define MSLC_ABI_H_

#ifdef __cplusplus
extern "C" {
#endif

#define MSLC_ABI_VERSION 5
#define MSLC_SIMD_WIDTH 32
#define MSLC_MAX_BUFFERS 31
#define MSLC_MAX_THREADGROUP_BUFFERS 31
#define MSLC_MAX_THREADS_PER_THREADGROUP 1024
#define MSLC_BUFFER_ALIGNMENT 256             // of a buffer's first byte, and no more
#define MSLC_THREADGROUP_BUFFER_ALIGNMENT 16  // lengths are multiples of it too
#define MSLC_MAX_THREADGROUP_MEMORY 32768     // limit per threadgroup on Apple's GPUs
#define MSLC_MOST_THREADGROUP_MEMORY 232448   // opt-in limit on an H100

typedef struct mslc_size {
  unsigned int x, y, z;
} mslc_size;

// ---- state that a kernel sees ------------------------------------------------------------------

// Shared by the threads of one threadgroup.
typedef struct mslc_threadgroup {
  void* buffers[MSLC_MAX_BUFFERS];
  void* threadgroup_buffers[MSLC_MAX_THREADGROUP_BUFFERS];
  mslc_size position;       // threadgroup_position_in_grid
  mslc_size size;           // threads_per_threadgroup (smaller in a ragged last group)
  mslc_size dispatch_size;  // dispatch_threads_per_threadgroup
  mslc_size grid;           // threadgroups_per_grid
  mslc_size threads_per_grid;
  unsigned int simdgroups;  // simdgroups_per_threadgroup
} mslc_threadgroup;

typedef struct mslc_thread {
  const mslc_threadgroup* group;
  mslc_size position;  // thread_position_in_threadgroup
  unsigned int index;  // thread_index_in_threadgroup
} mslc_thread;

typedef void (*mslc_entry)(const mslc_thread* thread);

// A position in the author's source. The layout is that of std::source_location::__impl, which
// clang fills through __builtin_source_location().
typedef struct mslc_site {
  const char* file;
  const char* function;
  unsigned int line;
  unsigned int column;
} mslc_site;

// ---- functions that a kernel calls -------------------------------------------------------------

// The operands of one SIMD-group operation: one pointer per lane, null if the lane is inactive.
typedef struct mslc_lanes {
  void* value[MSLC_SIMD_WIDTH];
  unsigned int active;  // bit i is set if lane i takes part
  const mslc_site* site;
} mslc_lanes;

// Runs once, after every active lane has arrived. It reads and writes the operands of all of them.
typedef void (*mslc_combine)(const mslc_lanes* lanes);

enum { MSLC_SCOPE_SIMDGROUP = 0, MSLC_SCOPE_THREADGROUP = 1 };
// The values of metal::mem_flags.
enum { MSLC_FENCE_DEVICE = 1, MSLC_FENCE_THREADGROUP = 2 };

// Identifies a threadgroup variable by address. All instantiations of the function that declares
// the variable share one object.
typedef struct mslc_variable {
  const char* name;
} mslc_variable;

// The compiler neither duplicates convergent calls nor moves them into branches. A position in the
// compiled kernel therefore maps to one in the source, and the runtime groups waiting lanes by it.
#ifdef __clang__
#define MSLC_CONVERGENT __attribute__((convergent, nomerge))
#else
#define MSLC_CONVERGENT
#endif
#define MSLC_API __attribute__((visibility("default")))

MSLC_API unsigned int mslc_lane(void) __attribute__((const));
MSLC_API void mslc_collective(void* value,
                              mslc_combine combine,
                              const mslc_site* site) MSLC_CONVERGENT;
// `fences` is a set of MSLC_FENCE_*: the memory whose accesses the barrier orders.
MSLC_API void mslc_barrier(int scope, unsigned int fences, const mslc_site* site) MSLC_CONVERGENT;
// A combine function calls this when the result of `lane` depends on lanes that do not take part.
MSLC_API void mslc_undefined_result(const mslc_lanes* lanes, unsigned int lane, const char* what);
// It calls this when `lane` would access a tensor beyond its extents.
MSLC_API void mslc_beyond_tensor(const mslc_lanes* lanes, unsigned int lane);
// A kernel uses an element that its lane's part of a cooperative tensor does not have.
MSLC_API void mslc_no_element(unsigned int index, unsigned int count);
// Returns the storage of a threadgroup variable, which is the same for all threads of a
// threadgroup.
MSLC_API void* mslc_threadgroup_variable(const mslc_variable* variable,
                                         unsigned long long size,
                                         unsigned int alignment);
// Events that profiled kernels count themselves.
enum { MSLC_COUNT_MATRIX_MULTIPLY = 0, MSLC_COUNT_TRANSCENDENTAL, MSLC_COUNT_KINDS };
MSLC_API void mslc_count(int what, unsigned int amount);
// Called by loops without a static bound, so that the step limit can stop them.
MSLC_API void mslc_step(void);

// ---- the kernel table of a compiled library ----------------------------------------------------

enum { MSLC_PARAMETER_BUFFER = 0, MSLC_PARAMETER_THREADGROUP = 1, MSLC_PARAMETER_BUILTIN = 2 };

typedef struct mslc_parameter {
  const char* name;
  const char* type;  // as written in the source
  int kind;
  int index;  // buffer or threadgroup index; unused for builtins
} mslc_parameter;

typedef struct mslc_kernel {
  const char* name;  // the host name
  mslc_entry entry;
  const mslc_parameter* parameters;
  unsigned int parameter_count;
  unsigned int max_threads;  // max_total_threads_per_threadgroup, or 0
} mslc_kernel;

// Exported by every compiled library.
typedef const mslc_kernel* (*mslc_kernels_function)(unsigned int* count);

// ---- launching ---------------------------------------------------------------------------------

enum {
  MSLC_DISPATCH_THREADS = 1,  // the grid counts threads, and the last threadgroups may be ragged
  MSLC_CHECKED = 2,           // check accesses; the library must be instrumented
  MSLC_PROFILED = 4,          // count accesses; the library must be instrumented
};

typedef struct mslc_buffer {
  void* data;
  unsigned long long size;    // bytes
  unsigned long long offset;  // offset of `data` in the allocated buffer
} mslc_buffer;

// The accesses to one buffer from one position in the compiled kernel. The active lanes of a SIMD
// group that reach the position together make one access.
typedef struct mslc_profile_site {
  const void* pc;
  int buffer;  // binding index, -1 for threadgroup memory
  int kind;    // 0 read, 1 write, 2 atomic read, 3 atomic write or exchange
  unsigned long long accesses;
  unsigned long long lanes;
  unsigned long long bytes;               // requested by all lanes
  unsigned long long transactions;        // 128-byte lines touched, or cycles of 32 4-byte banks
  unsigned long long ideal_transactions;  // the same for packed bytes
} mslc_profile_site;

typedef struct mslc_profile {
  mslc_profile_site* sites;  // owned by the profile, freed by mslc_profile_clear
  unsigned int site_count;
  unsigned int reserved;
  unsigned long long bytes_read[MSLC_MAX_BUFFERS];  // unique bytes, by binding index
  unsigned long long bytes_written[MSLC_MAX_BUFFERS];
  unsigned long long counts[MSLC_COUNT_KINDS];
  unsigned long long collective_lanes;  // active lanes, summed over all SIMD-group operations
  // Read and written: unique bytes of each threadgroup, summed over all.
  unsigned long long bytes_of_threadgroups[MSLC_MAX_BUFFERS];
} mslc_profile;

typedef struct mslc_launch {
  unsigned int struct_size;  // sizeof(mslc_launch), so that fields can be added at the end
  unsigned int flags;
  const mslc_kernel* kernel;
  const mslc_buffer* buffers;  // by binding index; `data` is null for unbound indices
  unsigned int buffer_count;
  unsigned int threadgroup_buffer_count;
  const unsigned int* threadgroup_lengths;  // bytes, by threadgroup index
  mslc_size grid;                           // threadgroups, or threads (MSLC_DISPATCH_THREADS)
  mslc_size threadgroup_size;               // threads per threadgroup
  unsigned long long seed;                  // 0: in order; any other value shuffles every schedule
  unsigned int threads;                     // number of host threads, 0: all cores
  unsigned int threadgroup_memory_limit;    // bytes, 0: MSLC_MAX_THREADGROUP_MEMORY
  unsigned long long step_limit;  // limit per threadgroup on synchronisation points, steps of
                                  // unbounded loops and (instrumented) memory accesses, 0: no limit
  mslc_profile* profile;          // zeroed by the caller; filled if MSLC_PROFILED is set
} mslc_launch;

enum mslc_finding_kind {
  MSLC_FINDING_NONE = 0,
  MSLC_FINDING_BAD_LAUNCH,
  MSLC_FINDING_BARRIER_DIVERGENCE,
  MSLC_FINDING_STEP_LIMIT,
  MSLC_FINDING_THREADGROUP_MEMORY,
  MSLC_FINDING_STACK_OVERFLOW,
  MSLC_FINDING_COLLECTIVE_DIVERGENCE,
  MSLC_FINDING_THREADGROUP_RACE,
  MSLC_FINDING_DEVICE_RACE,
  MSLC_FINDING_DEVICE_BOUNDS,
  MSLC_FINDING_THREADGROUP_BOUNDS,
  MSLC_FINDING_ARRAY_BOUNDS,
  MSLC_FINDING_UNINITIALISED,
  MSLC_FINDING_MISALIGNED,
  MSLC_FINDING_ARITHMETIC,
  MSLC_FINDING_TRAP,
};

typedef struct mslc_finding {
  int kind;
  unsigned int count;  // number of hits at this position
  const char* kernel;
  const char* file;  // null if the source position is unknown
  unsigned int line, column;
  const void* pc;  // null if file and line are known
  mslc_size threadgroup_position;
  int thread_index, other_thread;  // thread_index_in_threadgroup, or -1
  int buffer;                      // binding index, or -1
  long long offset;                // in bytes, from the start of the buffer
  unsigned int size;               // of the access, in bytes
  char message[240];
  const void* other_pc;  // position of the other access in a race, or null
} mslc_finding;

typedef struct mslc_report {
  unsigned int struct_size;  // set by the caller
  unsigned int failed;       // the launch was stopped and the outputs are incomplete
  mslc_finding* findings;    // owned by the report, freed by mslc_report_clear
  unsigned int finding_count;
  unsigned int finding_capacity;
  unsigned long long threadgroups;
  unsigned long long barriers;               // threadgroup barriers completed
  unsigned long long collectives;            // SIMD-group operations
  unsigned long long divergent_collectives;  // those that some live lane missed
  unsigned long long threadgroup_memory;     // largest use of one threadgroup, in bytes
} mslc_report;

// Returns 0, or 1 if the launch failed (report->failed). The findings give the reason.
MSLC_API int mslc_run(const mslc_launch* launch, mslc_report* report);
MSLC_API void mslc_report_clear(mslc_report* report);
MSLC_API void mslc_profile_clear(mslc_profile* profile);
MSLC_API unsigned int mslc_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif  // MSLC_ABI_H_
