// Address spaces as types, so that mixing them is a compile error, as in Metal.
//
// They use OpenCL's named attributes, because sanitizers ignore numbered address spaces. Strict
// mode (the lint) allows no conversion between spaces. It therefore rejects copies of structs out
// of `device` memory too: their implicit copy constructor takes a reference without a space. For
// execution, SYCL's rule applies: a named space converts to none.
#pragma once

#define thread
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define threadgroup_imageblock __attribute__((opencl_local))
#if defined(__NVPTX__)
// Metal's `constant` is not NVIDIA's 64 KB bank. It is device memory or, for values that the host
// passes, a kernel parameter. The compiler sees a separate space and the machine generic addresses;
// the optimiser infers which of the two it is.
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
