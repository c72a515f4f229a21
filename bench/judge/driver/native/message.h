// Messages of the judge, little-endian fields one after another, a message a packet; and the memory in which it finds
// what came of one, once this process stands still.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "system.h"

namespace kcap {

constexpr size_t LONGEST = 1 << 16;  // bytes of a message
constexpr size_t REPORT_BYTES = 1 << 16;

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

  Reader reader() const { return {content.data(), content.data() + content.size()}; }

  // What came with it is mapped by now, or not wanted.
  void close_descriptors() {
    for (int descriptor : descriptors) system_call(SYS_close, descriptor);
    descriptors.clear();
  }
};

// False when the judge has closed its end.
inline bool receive(int socket, Message& message) {
  message.content.resize(LONGEST);
  message.descriptors.clear();
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))];
  iovec part{message.content.data(), LONGEST};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  long count;
  do count = system_call(SYS_recvmsg, socket, reinterpret_cast<long>(&header), MSG_CMSG_CLOEXEC);
  while (count == -4);  // EINTR
  if (count <= 0) return false;
  message.content.resize(size_t(count));
  for (cmsghdr* one = CMSG_FIRSTHDR(&header); one; one = CMSG_NXTHDR(&header, one)) {
    if (one->cmsg_type != SCM_RIGHTS) continue;
    size_t number = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    message.descriptors.resize(number);
    std::memcpy(message.descriptors.data(), CMSG_DATA(one), number * sizeof(int));
  }
  return true;
}

// Whether the judge can read it: `descriptor` goes with it, unless it is -1.
inline bool send(int socket, const void* content, size_t size, int descriptor) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{const_cast<void*>(content), size};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* one = CMSG_FIRSTHDR(&header);
    one->cmsg_level = SOL_SOCKET, one->cmsg_type = SCM_RIGHTS, one->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(one), &descriptor, sizeof(int));
  }
  return system_call(SYS_sendmsg, socket, reinterpret_cast<long>(&header), MSG_DONTWAIT | MSG_NOSIGNAL) == long(size);
}

// What came of a message. The layout in memory is kcap.bench.judge.driver.protocol's REPORT.
struct Report {
  uint32_t code = 0;
  uint32_t iteration = 0;
  uint32_t method = 0;
  std::string text;

  void write(uint8_t* memory) const {
    uint32_t length = uint32_t(std::min(text.size(), size_t(4000)));
    uint32_t head[] = {code, iteration, method, length};
    std::memcpy(memory, head, sizeof head);
    std::memcpy(memory + sizeof head, text.data(), length);
  }
};

}  // namespace kcap
