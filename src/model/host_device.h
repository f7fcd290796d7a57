// CLOWDER_HD marks a function that host and device share. It is empty where no CUDA compiler runs.
//
// CLOWDER_HD_INLINE marks those that are so small that each caller takes its own copy. Code compiled for a newer
// instruction set may use only these: a linker might choose its copy of an ordinary inline function for all.
#pragma once

#ifdef __CUDACC__
#define CLOWDER_HD __host__ __device__
#define CLOWDER_HD_INLINE __host__ __device__ __forceinline__
#else
#define CLOWDER_HD
#define CLOWDER_HD_INLINE [[gnu::always_inline]] inline
#endif
