// Memory of a GPU that this process shares with the judge, by the descriptors of CUDA's virtual memory management: the sets
// of inputs are the judge's, and torch has what a Solution returns from pieces of which the judge is sent the descriptors.
#pragma once

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "message.h"

namespace kcap {

// CUDA's driver interface by its addresses, looked up before any code from elsewhere is here.
class VirtualMemory {
 public:
  using Handle = uint64_t;

  explicit VirtualMemory(int device) {
    void* found = dlopen("libcuda.so.1", RTLD_NOW);
    if (!found) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(found, name));
      if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
    };
    find(granularity_, "cuMemGetAllocationGranularity");
    find(create_, "cuMemCreate");
    find(export_, "cuMemExportToShareableHandle");
    find(import_, "cuMemImportFromShareableHandle");
    find(release_, "cuMemRelease");
    find(reserve_, "cuMemAddressReserve");
    find(forget_, "cuMemAddressFree");
    find(map_, "cuMemMap");
    find(unmap_, "cuMemUnmap");
    find(allow_, "cuMemSetAccess");
    properties_.location.device = device;
  }

  size_t whole(size_t size) const {
    size_t least = 0;
    check(granularity_(&least, &properties_, 0), "its granularity");
    return (std::max(size, size_t(1)) + least - 1) / least * least;
  }
  Handle created(size_t size) const {
    Handle handle = 0;
    check(create_(&handle, size, &properties_, 0), "making it");
    return handle;
  }
  int exported(Handle handle) const {
    int descriptor = -1;
    check(export_(&descriptor, handle, DESCRIPTOR, 0), "exporting it");
    return descriptor;
  }
  Handle imported(int descriptor) const {
    Handle handle = 0;
    check(import_(&handle, reinterpret_cast<void*>(intptr_t(descriptor)), DESCRIPTOR), "importing it");
    return handle;
  }
  uint8_t* mapped(Handle handle, size_t size) const {
    uint64_t base = 0;
    check(reserve_(&base, size, 0, 0, 0), "reserving addresses");
    check(map_(base, size, 0, handle, 0), "mapping it");
    Access access{properties_.location, READ_AND_WRITE};
    check(allow_(base, size, &access, 1), "allowing access");
    return reinterpret_cast<uint8_t*>(base);
  }
  void unmap(uint8_t* base, size_t size, Handle handle) const {
    unmap_(uint64_t(base), size), forget_(uint64_t(base), size), release_(handle);
  }

 private:
  static constexpr int PINNED = 1, DESCRIPTOR = 1, ON_DEVICE = 1, READ_AND_WRITE = 3;
  struct Location { int kind = ON_DEVICE, device = 0; };                             // CUmemLocation
  struct Properties { int kind = PINNED, handles = DESCRIPTOR; Location location; uint64_t rest[2] = {}; };
  struct Access { Location location; int flags; };                                   // CUmemAccessDesc

  static void check(int result, const char* what) {
    if (result) throw std::runtime_error(std::string("CUDA error: shared memory, ") + what + ": " + std::to_string(result));
  }

  Properties properties_;  // CUmemAllocationProp
  int (*granularity_)(size_t*, const void*, int) = nullptr;
  int (*create_)(Handle*, size_t, const void*, unsigned long long) = nullptr;
  int (*export_)(void*, Handle, int, unsigned long long) = nullptr;
  int (*import_)(Handle*, void*, int) = nullptr;
  int (*release_)(Handle) = nullptr;
  int (*reserve_)(uint64_t*, size_t, size_t, uint64_t, unsigned long long) = nullptr;
  int (*forget_)(uint64_t, size_t) = nullptr;
  int (*map_)(uint64_t, size_t, size_t, Handle, unsigned long long) = nullptr;
  int (*unmap_)(uint64_t, size_t) = nullptr;
  int (*allow_)(uint64_t, size_t, const void*, size_t) = nullptr;
};

// The judge's memory, which it sent the descriptor of.
class Imported {
 public:
  Imported(const VirtualMemory& memory, int descriptor, size_t size)
      : memory_(memory), size_(memory.whole(size)), handle_(memory.imported(descriptor)), base(memory.mapped(handle_, size_)) {}
  Imported(const Imported&) = delete;
  ~Imported() { memory_.unmap(base, size_, handle_); }

 private:
  const VirtualMemory& memory_;
  size_t size_;
  VirtualMemory::Handle handle_;

 public:
  uint8_t* const base;
};

// What torch's memory pool of a Solution's outputs is made of. The judge is told of each piece as it comes and goes.
class Pieces {
 public:
  const VirtualMemory* memory = nullptr;
  int socket = -1;

  void* take(size_t size) {
    std::lock_guard<std::mutex> one(mutex_);
    size = memory->whole(size);
    auto handle = memory->created(size);
    auto* base = memory->mapped(handle, size);
    int descriptor = memory->exported(handle);
    bool told = tell(base, size, descriptor);
    system_call(SYS_close, descriptor);
    if (!told) {
      memory->unmap(base, size, handle);
      throw std::runtime_error("the judge cannot be told of memory");
    }
    pieces_[base] = {size, handle};
    return base;
  }

  void give_back(void* base) {
    std::lock_guard<std::mutex> one(mutex_);
    auto found = pieces_.find(static_cast<uint8_t*>(base));
    if (found == pieces_.end()) return;
    tell(found->first, 0, -1);
    memory->unmap(found->first, found->second.size, found->second.handle);
    pieces_.erase(found);
  }

  bool hold(const void* place) {
    std::lock_guard<std::mutex> one(mutex_);
    auto after = pieces_.upper_bound(static_cast<uint8_t*>(const_cast<void*>(place)));
    if (after == pieces_.begin()) return false;
    --after;
    return place < after->first + after->second.size;
  }

 private:
  struct Piece { size_t size; VirtualMemory::Handle handle; };

  // Of 0 bytes, that it is gone. The layout is kcap.bench.judge.driver.protocol's PIECE.
  bool tell(uint8_t* base, uint64_t size, int descriptor) const {
    uint64_t words[] = {uint64_t(base), size};
    return send(socket, words, sizeof words, descriptor);
  }

  std::map<uint8_t*, Piece> pieces_;
  std::mutex mutex_;
};

inline Pieces pieces;

}  // namespace kcap
