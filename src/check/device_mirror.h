// Host buffers as an engine's passes see them: where they stand, or as copies in the memory of its device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "clowder/types.h"

namespace clowder::check {

class DeviceMirror {
 public:
  explicit DeviceMirror(EngineKind engine);
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  // The buffer must stay where it is as long as the mirror lives.
  template <class T>
  void add(const std::vector<T>& buffer) {
    add(buffer.data(), buffer.size() * sizeof(T));
  }

  // Where an engine finds what `host` points to; null for null.
  template <class T>
  T* of(T* host) const {
    return static_cast<T*>(const_cast<void*>(find(host)));
  }

  // All buffers to the device; back from it, once its passes have ended.
  void upload();
  void download();
  // Waits for the device's passes.
  void synchronise() const;

 private:
  struct Buffer {
    const std::byte* host;
    std::size_t bytes;
    std::byte* device;
  };

  void add(const void* host, std::size_t bytes);
  const void* find(const void* host) const;

  bool is_copy_;
  std::vector<Buffer> buffers_;
};

}  // namespace clowder::check
