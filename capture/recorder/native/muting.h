// The dispatcher asks at::getStepCallbacksUnlessEmpty who observes a call, and boxes its arguments for whoever does.
// Inside a recorded aten operator that is for nothing: kcap does not look. So the libraries' pointers to that function
// are exchanged for one that answers "nobody" there if nobody but kcap would be called. A pointer that cannot be
// exchanged costs time and changes nothing.
#pragma once
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "state.h"

namespace kcap {

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn);

constexpr const char* kAsked = "_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE";
// Always read from here: this library's own pointers to it are exchanged too.
decltype(&at::getStepCallbacksUnlessEmpty) volatile asked = &at::getStepCallbacksUnlessEmpty;

C10_NOINLINE std::optional<at::StepCallbacks> but_for_kcap(at::RecordScope scope) {
  auto callbacks = asked(scope);
  if (callbacks && callbacks->callbacks_.size() == 1 && callbacks->callbacks_[0].start_ == on_start) callbacks.reset();
  return callbacks;
}

std::optional<at::StepCallbacks> muted(at::RecordScope scope) {
  const Thread* t = tls_state;
  return t && t->aten_depth > 0 ? but_for_kcap(scope) : asked(scope);
}

// ---- the pointers ----

// How the memory there may be used; -1: unknown.
int protection(uintptr_t address) {
  std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "re"), std::fclose);
  char line[512], may[5];
  uintptr_t from, to;
  while (maps && std::fgets(line, sizeof line, maps.get())) {
    if (std::sscanf(line, "%lx-%lx %4s", &from, &to, may) != 3 || address < from || address >= to) continue;
    return (may[0] == 'r' ? PROT_READ : 0) | (may[1] == 'w' ? PROT_WRITE : 0) | (may[2] == 'x' ? PROT_EXEC : 0);
  }
  return -1;
}

// Where the loader has made the memory read-only, it is writable for as long as the exchange takes.
bool exchange(void** pointer, void* from, void* to) {
  const auto address = reinterpret_cast<uintptr_t>(pointer), size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const int before = protection(address);
  const bool locked = !(before & PROT_WRITE);
  void* page = reinterpret_cast<void*>(address & ~(size - 1));
  if (before < 0 || (locked && mprotect(page, size, before | PROT_WRITE) != 0)) return false;
  const bool done = __atomic_compare_exchange_n(pointer, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  if (locked) mprotect(page, size, before);
  return done;
}

#if defined(__x86_64__)
constexpr bool is_import(uint64_t type) { return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT; }
#elif defined(__aarch64__)
constexpr bool is_import(uint64_t type) { return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT; }
#else
constexpr bool is_import(uint64_t) { return false; }
#endif

// What a loaded library needs of others, by its dynamic section.
class Library {
 public:
  explicit Library(const dl_phdr_info& info) : base_(info.dlpi_addr) {
    for (int i = 0; i < info.dlpi_phnum; i++)
      if (info.dlpi_phdr[i].p_type == PT_DYNAMIC) read(reinterpret_cast<const Elf64_Dyn*>(base_ + info.dlpi_phdr[i].p_vaddr));
  }

  // Each pointer to the function of this name that holds `value`.
  template <class F>
  void each_pointer_to(const char* name, const void* value, F&& visit) const {
    if (!symbols_ || !names_ || !with_addends_) return;
    for (const Table& table : {calls_, data_}) {
      for (size_t i = 0; table.entries && i < table.bytes / sizeof(Elf64_Rela); i++) {
        const Elf64_Rela& entry = table.entries[i];
        auto** pointer = reinterpret_cast<void**>(base_ + entry.r_offset);
        if (!is_import(ELF64_R_TYPE(entry.r_info)) || *pointer != value) continue;
        if (std::strcmp(names_ + symbols_[ELF64_R_SYM(entry.r_info)].st_name, name) == 0) visit(pointer);
      }
    }
  }

 private:
  struct Table { const Elf64_Rela* entries = nullptr; size_t bytes = 0; };

  void read(const Elf64_Dyn* entry) {
    for (; entry->d_tag != DT_NULL; entry++) {
      switch (entry->d_tag) {
        case DT_SYMTAB: symbols_ = at<Elf64_Sym>(*entry); break;
        case DT_STRTAB: names_ = at<char>(*entry); break;
        case DT_JMPREL: calls_.entries = at<Elf64_Rela>(*entry); break;
        case DT_PLTRELSZ: calls_.bytes = entry->d_un.d_val; break;
        case DT_PLTREL: with_addends_ = entry->d_un.d_val == DT_RELA; break;
        case DT_RELA: data_.entries = at<Elf64_Rela>(*entry); break;
        case DT_RELASZ: data_.bytes = entry->d_un.d_val; break;
      }
    }
  }

  // The loader has made an address of the offset in most libraries, but not in the kernel's own.
  template <class T>
  const T* at(const Elf64_Dyn& entry) const {
    const auto value = entry.d_un.d_ptr;
    return reinterpret_cast<const T*>(value < base_ ? base_ + value : value);
  }

  uintptr_t base_;
  const Elf64_Sym* symbols_ = nullptr;
  const char* names_ = nullptr;
  Table calls_, data_;
  bool with_addends_ = true;
};

// ---- on and off ----

struct Walk {  // through all libraries
  void *from, *to;
  unsigned long long before, loaded = 0;  // how often a library was loaded, by the last walk and by now
  int exchanged = 0;
};

int exchange_in(dl_phdr_info* library, size_t, void* data) {
  Walk& walk = *static_cast<Walk*>(data);
  walk.loaded = library->dlpi_adds;
  if (walk.loaded == walk.before) return 1;
  Library(*library).each_pointer_to(kAsked, walk.from, [&](void** pointer) {
    walk.exchanged += exchange(pointer, walk.from, walk.to);
  });
  return 0;
}

class Muting {
 public:
  // Once more for what was loaded since.
  void on() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!allowed_) return;
    Walk walk{reinterpret_cast<void*>(asked), reinterpret_cast<void*>(muted), loaded_};
    dl_iterate_phdr(exchange_in, &walk);
    loaded_ = walk.loaded;
    exchanged_ += walk.exchanged;
  }

  // A pointer that somebody else exchanged since stays theirs.
  void off() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!std::exchange(exchanged_, 0)) return;
    Walk walk{reinterpret_cast<void*>(muted), reinterpret_cast<void*>(asked), 0};
    dl_iterate_phdr(exchange_in, &walk);
    loaded_ = 0;
  }

  void allow(bool allowed) {
    std::lock_guard<std::mutex> guard(mutex_);
    allowed_ = allowed;
  }

  int exchanged() {
    std::lock_guard<std::mutex> guard(mutex_);
    return exchanged_;
  }

 private:
  std::mutex mutex_;
  bool allowed_ = true;
  unsigned long long loaded_ = 0;
  int exchanged_ = 0;
};
inline Muting& muting() { static Muting m; return m; }

}  // namespace kcap
