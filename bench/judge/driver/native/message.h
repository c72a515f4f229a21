// Messages of the judge and answers to it: little-endian fields one after another, a message a packet. Each begins with
// a random number that its answer repeats: nobody can answer what was not asked yet.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "system.h"

namespace kcap {

constexpr size_t LONGEST = 1 << 20;  // bytes of a message

struct Reader {
  const uint8_t* at;
  const uint8_t* end;

  template <typename T>
  T take() {
    if (size_t(end - at) < sizeof(T)) throw std::runtime_error("a message of the judge ends too early");
    T value;
    std::memcpy(&value, at, sizeof(T));
    at += sizeof(T);
    return value;
  }
  uint32_t u32() { return take<uint32_t>(); }
  uint64_t u64() { return take<uint64_t>(); }
  std::string text() {
    size_t count = u32();
    if (size_t(end - at) < count) throw std::runtime_error("a message of the judge ends too early");
    std::string value(reinterpret_cast<const char*>(at), count);
    at += count;
    return value;
  }
};

struct Message {
  std::vector<uint8_t> content;
  std::vector<int> descriptors;
  uint64_t nonce = 0;

  Reader reader() const { return {content.data() + sizeof nonce, content.data() + content.size()}; }

  // What came with it is mapped by now, or not wanted: no code from elsewhere needs to find it.
  void close_descriptors() {
    for (int descriptor : descriptors) system_call(SYS_close, descriptor);
    descriptors.clear();
  }
};

// False when the judge has closed its end.
inline bool receive(int socket, Message& message) {
  message.content.resize(LONGEST);
  message.descriptors.clear();
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
  iovec part{message.content.data(), LONGEST};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  long count;
  do count = system_call(SYS_recvmsg, socket, reinterpret_cast<long>(&header), MSG_CMSG_CLOEXEC);
  while (count == -4);  // EINTR
  if (count < long(sizeof message.nonce)) return false;
  message.content.resize(size_t(count));
  std::memcpy(&message.nonce, message.content.data(), sizeof message.nonce);
  for (cmsghdr* one = CMSG_FIRSTHDR(&header); one; one = CMSG_NXTHDR(&header, one)) {
    if (one->cmsg_type != SCM_RIGHTS) continue;
    size_t number = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    message.descriptors.resize(number);
    std::memcpy(message.descriptors.data(), CMSG_DATA(one), number * sizeof(int));
  }
  return true;
}

struct Answer {
  uint32_t code = 0;
  uint32_t iteration = 0;
  uint32_t method = 0;
  uint64_t elapsed_ns = 0;  // of all calls by the driver's clock
  uint64_t stray_ns = 0;    // CPU time of other threads between the calls, and before the first
  uint64_t outside_ns = 0;  // between the calls
  std::string text;

  void send(int socket, uint64_t nonce) const {
    std::string kept = text.substr(0, 4000);
    std::vector<uint8_t> out;
    auto add = [&](const void* from, size_t count) {
      auto* bytes = static_cast<const uint8_t*>(from);
      out.insert(out.end(), bytes, bytes + count);
    };
    add(&nonce, 8), add(&code, 4), add(&iteration, 4), add(&method, 4);
    add(&elapsed_ns, 8), add(&stray_ns, 8), add(&outside_ns, 8);
    add(kept.data(), kept.size());
    long done;
    do done = system_call(SYS_write, socket, reinterpret_cast<long>(out.data()), long(out.size()));
    while (done == -4);
  }
};

}  // namespace kcap
