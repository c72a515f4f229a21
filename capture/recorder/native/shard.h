// What a process leaves on disk while it runs: `<stem>.jsonl`, appended line by line, and `<stem>.counts`, a shared
// mapping, so that a kill loses nothing that was counted. A line is on disk before any count that refers to it; until
// then it may wait for others, since a call of the system for each would slow a step that has many new calls.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <string>

namespace kcap {

using Cell = std::atomic<uint64_t>;
static_assert(sizeof(Cell) == 8 && Cell::is_always_lock_free);

constexpr uint64_t kMagic = 0x31304341504B0Aull;
constexpr size_t kMaxBatches = 1 << 16, kMaxCalls = 1 << 17, kPhases = 4;

enum Header : size_t { hMagic, hClosed, hFailed, hSteps, hOverflow, hTraced, hOffStep, hSamplesSkipped, hLooseSteps = 16, hSize = 64 };

class Shard {
 public:
  void open(const std::string& stem) {
    path_ = stem + ".jsonl";
    lines_ = ::open(path_.c_str(), O_CREAT | O_EXCL | kAppend, 0600);
    if (lines_ < 0 || ::fstat(lines_, &file_)) fail("open " + path_);
    const int fd = ::open((stem + ".counts").c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) fail("open " + stem + ".counts");
    // Real blocks, so that a full disk is an error here and never a SIGBUS in the engine.
    const int error = ::posix_fallocate(fd, 0, kBytes);
    if (error) { ::close(fd); errno = error; fail("reserve counts"); }
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) fail("map counts");
    cells_ = static_cast<Cell*>(memory);
    header(hMagic) = kMagic;
  }

  Cell& header(Header h) { return cells_[h]; }
  Cell& batch(size_t id) { return cells_[hSize + id]; }
  Cell& loose(size_t call, size_t phase) { return cells_[hSize + kMaxBatches + call * kPhases + phase]; }

  void close() {
    std::lock_guard<std::mutex> guard(mutex_);
    put();
    release();
  }
  // Without the lock, which a forked child may find held for ever. What a thread under way still counts or writes goes
  // nowhere: the address stays, the file and its blocks are given back.
  void release() {
    closed_ = true;
    if (cells_ != unmapped_) ::mmap(cells_, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (is_ours()) ::close(lines_);
    lines_ = -1;
  }

  // On disk at the next flush at the latest.
  void add(std::string_view text) {
    std::lock_guard<std::mutex> guard(mutex_);
    waiting_ += text;
    waits_.store(true, std::memory_order_relaxed);
    if (waiting_.size() >= kMostWaiting) put();
  }
  void flush() {
    if (!waits_.load(std::memory_order_relaxed)) return;
    std::lock_guard<std::mutex> guard(mutex_);
    put();
  }
  void write(std::string_view text) {
    add(text);
    flush();
  }

 private:
  static constexpr size_t kMostWaiting = 1 << 16;
  static constexpr int kAppend = O_WRONLY | O_APPEND | O_CLOEXEC;
  // A program may close descriptors that are not its own, as a daemon does, and open its own files under their numbers.
  bool is_ours() const {
    struct stat found;
    return !::fstat(lines_, &found) && found.st_dev == file_.st_dev && found.st_ino == file_.st_ino;
  }
  void put() {
    std::string_view text = waiting_;
    if (!text.empty() && !closed_ && !is_ours() && (lines_ = ::open(path_.c_str(), kAppend)) < 0) fail("open " + path_);
    while (!text.empty() && !closed_) {
      const ssize_t n = ::write(lines_, text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) { waiting_.erase(0, waiting_.size() - text.size()); fail("write"); }
      text.remove_prefix(static_cast<size_t>(n));
    }
    waiting_.clear();
    waits_.store(false, std::memory_order_relaxed);
  }
  static constexpr size_t kBytes = 8 * (hSize + kMaxBatches + kMaxCalls * kPhases);
  [[noreturn]] static void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }
  int lines_ = -1;
  std::string path_;
  struct stat file_ = {};
  bool closed_ = false;
  std::string waiting_;
  std::atomic<bool> waits_{false};
  Cell unmapped_[hSize] = {};  // what failed before the counts could be mapped is told to nobody
  Cell* cells_ = unmapped_;
  std::mutex mutex_;
};

}  // namespace kcap
