// Address spaces as types, so that mixing them is a compile error like in Metal.
//
// The named OpenCL attributes are used, not numbered address spaces: sanitizers instrument only the
// former. Two modes exist. In strict mode (the lint) no conversion between spaces is allowed, which
// also rejects copying a struct out of `device` memory, because its implicit copy constructor takes
// a reference without a space. For running, SYCL's rule is used: a named space converts to none.
#pragma once

#define thread
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define threadgroup_imageblock __attribute__((opencl_local))
#if defined(__NVPTX__)
// Metal's `constant` is not NVIDIA's 64 KB bank: it is device memory or, for what the host passes
// by value, a kernel parameter. This is a space of its own for the compiler, and generic addresses
// for the machine; the optimiser finds out which of the two it is.
#define constant const __attribute__((opencl_private))
#elif defined(MSLC_STRICT)
#define constant const __attribute__((opencl_constant))
#else
#define constant const __attribute__((opencl_global_host))
#endif

#define MSLC_INLINE inline __attribute__((always_inline))
#define METAL_FUNC MSLC_INLINE
#define MSLC_KERNEL static MSLC_INLINE
#ifdef MSLC_STRICT
#define MSLC_EXPORT
#else
#define MSLC_EXPORT [[clang::sycl_external]] __attribute__((visibility("default")))
#endif
