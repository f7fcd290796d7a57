#include "engine/sm90/cuda_support.h"
#include "engine/sm90/forward.cuh"
#include "engine/sm90/forward_launch.h"

namespace clowder::sm90 {

void launch_forward(const ForwardParams<1>& params, int blocks, void* stream) {
  with_activation(params.activation, [&](auto activation) {
    const auto kernel = forward_kernel<ForwardParams<1>, decltype(activation)>;
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "preparing the forward kernel");
    kernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params,
                                                                                                         activation);
    require(cudaGetLastError(), "launching the forward kernel");
  });
}

}  // namespace clowder::sm90
