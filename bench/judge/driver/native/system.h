// System calls of the driver, inline: no table of library addresses lies between it and the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace kcap {

inline long system_call(long number, long a = 0, long b = 0, long c = 0) {
#if defined(__x86_64__)
  long out;
  asm volatile("syscall" : "=a"(out) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return out;
#elif defined(__aarch64__)
  register long x8 asm("x8") = number;
  register long x0 asm("x0") = a;
  register long x1 asm("x1") = b;
  register long x2 asm("x2") = c;
  asm volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
#else
#error "kcap bench: no system calls are written for this processor"
#endif
}

// Until the judge lets this process run again: how it says that it has done what it was asked.
inline void stand_still() {
  system_call(SYS_tgkill, system_call(SYS_getpid), system_call(SYS_gettid), SIGSTOP);
}

}  // namespace kcap
