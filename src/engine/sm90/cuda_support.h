// The CUDA runtime as this library uses it: errors become Error, memory has an owner.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "clowder/types.h"

namespace clowder::sm90 {

// `what` completes "... failed".
inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  const bool is_memory = error == cudaErrorMemoryAllocation;
  const std::string reason = std::string(what) + " failed: " + cudaGetErrorString(error);
  // An error that is not read stays for whoever asks next.
  cudaGetLastError();
  throw Error(is_memory ? ErrorCode::kUnsupported : ErrorCode::kInternal, reason);
}

// Device memory of `count` elements, zeroed.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t count) : count_(count) {
    if (count == 0) return;
    require(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "allocating device memory");
    require(cudaMemset(data_, 0, bytes()), "clearing device memory");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  T* data() const { return data_; }
  std::int64_t count() const { return count_; }
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }
  void fill(int byte, cudaStream_t stream) {
    if (count_ > 0) require(cudaMemsetAsync(data_, byte, bytes(), stream), "filling device memory");
  }
  void upload(const T* from, std::int64_t count, cudaStream_t stream) {
    if (count == 0) return;
    require(cudaMemcpyAsync(data_, from, static_cast<std::size_t>(count) * sizeof(T), cudaMemcpyHostToDevice, stream),
            "copying to the device");
  }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

// Host memory that the device writes to, zeroed.
template <class T>
class MappedObject {
 public:
  MappedObject() {
    require(cudaHostAlloc(reinterpret_cast<void**>(&data_), sizeof(T), cudaHostAllocMapped), "allocating host memory");
    *data_ = T{};
  }
  ~MappedObject() { cudaFreeHost(data_); }
  MappedObject(const MappedObject&) = delete;
  MappedObject& operator=(const MappedObject&) = delete;

  const T& host() const { return *data_; }
  T* device() const {
    void* pointer = nullptr;
    require(cudaHostGetDevicePointer(&pointer, data_, 0), "mapping host memory");
    return static_cast<T*>(pointer);
  }

 private:
  T* data_ = nullptr;
};

}  // namespace clowder::sm90
