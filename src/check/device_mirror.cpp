#include "check/device_mirror.h"

#ifdef CLOWDER_HAS_SM90
#include "engine/sm90/cuda_support.h"
#endif

namespace clowder::check {

DeviceMirror::DeviceMirror(EngineKind engine) : is_copy_(engine != EngineKind::kCpu) {}

const void* DeviceMirror::find(const void* host) const {
  if (!is_copy_ || host == nullptr) return host;
  const auto* address = static_cast<const std::byte*>(host);
  for (const Buffer& buffer : buffers_) {
    if (address >= buffer.host && address <= buffer.host + buffer.bytes) return buffer.device + (address - buffer.host);
  }
  throw Error(ErrorCode::kInternal, "a buffer of the checker has no copy on the device");
}

#ifdef CLOWDER_HAS_SM90

DeviceMirror::~DeviceMirror() {
  for (const Buffer& buffer : buffers_) cudaFree(buffer.device);
}

void DeviceMirror::add(const void* host, std::size_t bytes) {
  if (!is_copy_ || bytes == 0) return;
  Buffer buffer{static_cast<const std::byte*>(host), bytes, nullptr};
  sm90::require(cudaMalloc(reinterpret_cast<void**>(&buffer.device), bytes), "allocating device memory");
  buffers_.push_back(buffer);
}

void DeviceMirror::upload() {
  for (const Buffer& buffer : buffers_) {
    sm90::require(cudaMemcpy(buffer.device, buffer.host, buffer.bytes, cudaMemcpyHostToDevice),
                  "copying to the device");
  }
}

void DeviceMirror::synchronise() const {
  if (is_copy_) sm90::require(cudaDeviceSynchronize(), "a pass");
}

void DeviceMirror::download() {
  synchronise();
  for (const Buffer& buffer : buffers_) {
    sm90::require(cudaMemcpy(const_cast<std::byte*>(buffer.host), buffer.device, buffer.bytes, cudaMemcpyDeviceToHost),
                  "copying from the device");
  }
}

#else

DeviceMirror::~DeviceMirror() = default;
void DeviceMirror::add(const void*, std::size_t) {}
void DeviceMirror::upload() {}
void DeviceMirror::download() {}
void DeviceMirror::synchronise() const {}

#endif

}  // namespace clowder::check
