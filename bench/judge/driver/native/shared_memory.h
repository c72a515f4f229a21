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
    auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(found, name));
    };
    auto find = [&](auto& function, const char* name) {
      look_up(function, name);
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
    find(wait_, "cuCtxSynchronize");
    look_up(wait_for_, "cuStreamWaitValue32_v2"), look_up(write_, "cuStreamWriteValue32_v2");
    find(exchange_mode_, "cuThreadExchangeStreamCaptureMode");
    properties_.location.device = device;
  }

  // How strict CUDA is with this thread's calls while a stream is captured; what it was.
  int capture_mode(int mode) const {
    exchange_mode_(&mode);
    return mode;
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
    Access access{properties_.location, READ_AND_WRITE};
    check(reserve_(&base, size, 0, 0, 0), "reserving addresses");
    int unmapped = map_(base, size, 0, handle, 0), forbidden = unmapped ? 0 : allow_(base, size, &access, 1);
    if (unmapped || forbidden) unmap_(base, size), forget_(base, size);
    check(unmapped, "mapping it"), check(forbidden, "allowing access");
    return reinterpret_cast<uint8_t*>(base);
  }
  void unmap(uint8_t* base, size_t size) const { unmap_(uint64_t(base), size), forget_(uint64_t(base), size); }
  void release(Handle handle) const { release_(handle); }

  // What comes on `stream` from now on waits until the word at `place` is no less than `value`; false where that cannot be.
  bool wait_for(void* stream, const uint32_t* place, uint32_t value) const {
    return wait_for_ && write_ && !wait_for_(stream, uint64_t(place), value, NO_LESS);
  }
  // When all is done that came on `stream` before.
  void write(void* stream, uint32_t* place, uint32_t value) const {
    check(write_(stream, uint64_t(place), value, 0), "writing to it");
  }

  // Until all is done that this process asked for: to unmap and to release memory does not wait, as cudaFree does.
  void wait() const { wait_(); }

 private:
  static constexpr int PINNED = 1, DESCRIPTOR = 1, ON_DEVICE = 1, READ_AND_WRITE = 3;
  static constexpr unsigned NO_LESS = 0;  // CU_STREAM_WAIT_VALUE_GEQ
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
  int (*wait_)() = nullptr;
  int (*wait_for_)(void*, uint64_t, uint32_t, unsigned) = nullptr;
  int (*write_)(void*, uint64_t, uint32_t, unsigned) = nullptr;
  int (*exchange_mode_)(int*) = nullptr;
};

// Memory that is mapped here, for as long as it lives: of `handle`, which is its own.
class Mapping {
 public:
  Mapping(const VirtualMemory& memory, VirtualMemory::Handle handle, size_t size)
      : size(size), base(mapped(memory, handle, size)), memory_(memory), handle_(handle) {}
  Mapping(const Mapping&) = delete;
  ~Mapping() { memory_.wait(), memory_.unmap(base, size), memory_.release(handle_); }

  int exported() const { return memory_.exported(handle_); }

  const size_t size;
  uint8_t* const base;

 private:
  static uint8_t* mapped(const VirtualMemory& memory, VirtualMemory::Handle handle, size_t size) try {
    return memory.mapped(handle, size);
  } catch (...) {
    memory.release(handle);
    throw;
  }

  const VirtualMemory& memory_;
  const VirtualMemory::Handle handle_;
};

// While it lives, what this thread asks for is no part of what is captured, and does not end that.
class Relaxed {
 public:
  explicit Relaxed(const VirtualMemory& memory) : memory_(memory), was_(memory.capture_mode(RELAXED)) {}
  Relaxed(const Relaxed&) = delete;
  ~Relaxed() { memory_.capture_mode(was_); }

 private:
  static constexpr int RELAXED = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  const VirtualMemory& memory_;
  int was_;
};

// What torch's memory pool of a Solution's outputs is made of. The judge is told of each piece as it comes and goes, and
// reads that only later: so there are few of them, each a fair share larger than torch asks for.
class Pieces {
 public:
  const VirtualMemory* memory = nullptr;
  int socket = -1;

  void* take(size_t size) {
    std::lock_guard<std::mutex> one(mutex_);
    size = memory->whole(size);
    for (auto& [base, piece] : pieces_)
      for (auto& [offset, room] : piece.free)
        if (room >= size) return part(base, piece, offset, size);
    size_t all = 0;
    for (auto& [base, piece] : pieces_) all += piece.memory->size;
    auto* base = made(size, std::max(all / SHARE, LEAST));
    return part(base, pieces_[base], 0, size);
  }

  void give_back(void* place, size_t size) {
    std::lock_guard<std::mutex> one(mutex_);
    auto found = piece_of(place);
    if (found == pieces_.end()) return;
    memory->wait();  // torch takes it for cudaFree
    auto& [base, piece] = *found;
    size_t begin = static_cast<uint8_t*>(place) - base;
    auto after = piece.free.emplace(begin, memory->whole(size)).first;
    if (auto next = std::next(after); next != piece.free.end() && after->first + after->second == next->first)
      after->second += next->second, piece.free.erase(next);
    if (after != piece.free.begin())
      if (auto before = std::prev(after); before->first + before->second == begin)
        before->second += after->second, piece.free.erase(after);
    if (piece.free.begin()->second < piece.memory->size) return;
    tell(base, 0, -1);
    pieces_.erase(found);
  }

  bool hold(const void* place) {
    std::lock_guard<std::mutex> one(mutex_);
    return piece_of(place) != pieces_.end();
  }

 private:
  static constexpr size_t SHARE = 4, LEAST = 64 << 20;
  struct Piece { std::unique_ptr<Mapping> memory; std::map<size_t, size_t> free; };  // bytes, by their offset
  using Known = std::map<uint8_t*, Piece>;

  static void* part(uint8_t* base, Piece& piece, size_t offset, size_t size) {
    size_t room = piece.free[offset];
    piece.free.erase(offset);
    if (room > size) piece.free[offset + size] = room - size;
    return base + offset;
  }

  // A new piece of as many bytes as are wanted, or, where there are not so many, of those that are needed.
  uint8_t* made(size_t needed, size_t wanted) {
    auto make = [&](size_t size) { return std::make_unique<Mapping>(*memory, memory->created(size), size); };
    size_t size = std::max(needed, memory->whole(wanted));
    std::unique_ptr<Mapping> mapping;
    Relaxed still(*memory);
    try {
      mapping = make(size);
    } catch (const std::exception&) {
      mapping = make(size = needed);
    }
    int descriptor = mapping->exported();
    bool told = tell(mapping->base, size, descriptor);
    system_call(SYS_close, descriptor);
    if (!told) throw std::runtime_error("the judge cannot be told of memory");
    auto* base = mapping->base;
    pieces_[base] = {std::move(mapping), {{0, size}}};
    return base;
  }

  Known::iterator piece_of(const void* place) {
    auto after = pieces_.upper_bound(static_cast<uint8_t*>(const_cast<void*>(place)));
    if (after == pieces_.begin()) return pieces_.end();
    --after;
    return place < after->first + after->second.memory->size ? after : pieces_.end();
  }

  // Of 0 bytes, that it is gone. The layout is kcap.bench.judge.driver.protocol's PIECE.
  bool tell(uint8_t* base, uint64_t size, int descriptor) const {
    uint64_t words[] = {uint64_t(base), size};
    return send(socket, words, sizeof words, descriptor);
  }

  Known pieces_;
  std::mutex mutex_;
};

inline Pieces& pieces = *new Pieces;  // CUDA is gone when a process ends

}  // namespace kcap
