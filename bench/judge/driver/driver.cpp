// The part of a candidate's process that the judge talks to: it fills inputs, calls the Solution between two readings of
// the clock, and copies outputs out. Once a Solution's code has run here, nothing that Python says is asked for.
//
// What it cannot hold: code in the same process can overwrite it. So the judge believes its times only as far as its
// own clock bounds them, and only for outputs that are right (kcap.bench.judge).
#include "native/cuda.h"

namespace kcap {
namespace {

struct Device {
  Runtime cuda;
  Torch torch;
};

struct Session {
  Workload workload;
  Mapped pool, shared;
  std::unique_ptr<Place> place;

  Session(const Message& message, const Device* device) {
    workload.read(message.reader());
    auto& given = message.descriptors;
    if (given.size() != (workload.handed ? 1 : 2)) throw std::runtime_error("the judge shares no memory");
    shared = Mapped(given[0], workload.shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    if (!workload.handed) pool = Mapped(given[1], workload.pool_bytes, PROT_READ, MAP_SHARED);
    if (device) place = std::make_unique<Cuda>(workload, pool.base, device->cuda, device->torch);
    else place = std::make_unique<Host>(workload, pool.base);
  }
};

Answer answer(
    Message& message, std::unique_ptr<Session>& session, PyObject* callable, PyObject* watched,
    const Device* device, bool other_clock) {
  auto reader = message.reader();
  switch (reader.u32()) {
    case OPEN:
      session.reset();
      session = std::make_unique<Session>(message, device);
      return {};
    case EMPTY:
    case RUN: {
      if (!session) throw std::runtime_error("no Workload is open");
      Run run(message, session->workload);
      session->place->bring(run);
      message.close_descriptors();
      return session->place->run(run, callable, session->shared.base);
    }
    case DELIVER: {
      if (!session) throw std::runtime_error("no Workload is open");
      for (uint32_t left = reader.u32(); left; --left) session->place->deliver(reader.u32(), session->shared.base);
      return {};
    }
    case CHECK: {
      Answer out;
      out.text = replaced(watched);
      if (other_clock) out.text += out.text.empty() ? "clock_gettime" : ", clock_gettime";
      out.code = out.text.empty() ? FINE : PATCHED;
      return out;
    }
    default: throw std::runtime_error("the judge asks for what this driver does not know");
  }
}

}  // namespace
}  // namespace kcap

// Answers the judge on `socket` until it closes its end. The GIL is held throughout: threads of Python's run only inside
// the calls.
// Of a GPU: `library`, the file name of CUDA's runtime, and `torch` (native/cuda.h's Torch); null on the CPU. They are
// looked up by kcap_open, before any code from elsewhere is here.
extern "C" void* kcap_open(const char* library, PyObject* torch) {
  try {
    Py_XINCREF(torch);
    return new kcap::Device{kcap::Runtime(library), kcap::Torch(torch)};
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

extern "C" void kcap_serve(int socket, PyObject* callable, PyObject* watched, void* device) {
  kcap::Message message;
  bool other_clock = false;  // a replaced one is right at first
  std::unique_ptr<kcap::Session> session;
  while (kcap::receive(socket, message)) {
    kcap::Answer answer;
    other_clock |= kcap::clock_replaced();
    try {
      answer = kcap::answer(message, session, callable, watched, static_cast<kcap::Device*>(device), other_clock);
    } catch (const kcap::Wrong& wrong) {
      answer.code = wrong.code, answer.text = wrong.what();
    } catch (const std::exception& error) {
      answer.code = kcap::DRIVER, answer.text = error.what();
    }
    message.close_descriptors();
    answer.send(socket, message.nonce);
    if (session) session->place->rest();
  }
}

// Of the judge's own process: native/handed.h's Filler. `opening` is what a candidate is told of the Workload, and `pool`
// where the content of its inputs lies.
extern "C" void* kcap_filler(const uint8_t* opening, size_t size, int pool) {
  try {
    return new kcap::Filler(opening, size, pool);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

extern "C" size_t kcap_filler_most(void* filler) { return static_cast<kcap::Filler*>(filler)->most(); }

extern "C" size_t kcap_filler_fill(
    void* filler, uint8_t* base, uint64_t seed, uint32_t first, uint32_t count, uint64_t* places) {
  try {
    return static_cast<kcap::Filler*>(filler)->fill(base, seed, first, count, places);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return 0;
  }
}

extern "C" int kcap_filler_changed(void* filler, uint32_t i) { return static_cast<kcap::Filler*>(filler)->changed(i); }

extern "C" void kcap_filler_close(void* filler) { delete static_cast<kcap::Filler*>(filler); }
