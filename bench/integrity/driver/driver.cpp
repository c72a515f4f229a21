// The part of a candidate's process that the judge talks to: it fills inputs, calls the Solution between two readings of
// the clock, and copies outputs out. Once a Solution's code has run here, nothing that Python says is asked for.
//
// What it cannot hold: code in the same process can overwrite it. So the judge believes its times only as far as its
// own clock bounds them, and only for outputs that are right (kcap.bench.judge).
#include "native/cuda.h"

namespace kcap {
namespace {

enum Operation : uint32_t { OPEN = 1, RUN = 2, CHECK = 3, DELIVER = 4 };

struct Device {
  Runtime cuda;
  Torch torch;
};

struct Session {
  Workload workload;
  Mapped pool, shared;
  std::unique_ptr<Place> place;

  Session(const Message& message, const Device* device) {
    if (message.descriptors.size() != 2) throw std::runtime_error("the judge shares no memory");
    workload.read(message.reader());
    pool = Mapped(message.descriptors[0], workload.pool_bytes, PROT_READ, MAP_SHARED);
    shared = Mapped(message.descriptors[1], workload.shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    for (int descriptor : message.descriptors) close(descriptor);
    if (device) place = std::make_unique<Cuda>(workload, pool.base, device->cuda, device->torch);
    else place = std::make_unique<Host>(workload, pool.base);
  }
};

Answer answer(
    const Message& message, std::unique_ptr<Session>& session, PyObject* callable, PyObject* watched,
    const Device* device, bool other_clock) {
  auto reader = message.reader();
  switch (reader.u32()) {
    case OPEN:
      session.reset();
      session = std::make_unique<Session>(message, device);
      return {};
    case RUN:
      if (!session) throw std::runtime_error("no Workload is open");
      return session->place->run(Run(message.reader(), session->workload), callable, session->shared.base);
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
    answer.send(socket);
  }
}
