// CLOWDER_HD marks a function that host and device share. It is empty where no CUDA compiler runs.
#pragma once

#ifdef __CUDACC__
#define CLOWDER_HD __host__ __device__
#else
#define CLOWDER_HD
#endif
