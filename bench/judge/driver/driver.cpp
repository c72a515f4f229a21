// The part of a candidate's process that the judge asks: it calls the Solution, and keeps what that returns. It has no
// clock, and nothing that it reports is evidence: the judge's own clock runs from when this process may run, or what it has
// launched, until all of that stands still, and what it finds in memory then is compared.
#include "native/cuda.h"
#include "native/host.h"

namespace kcap {
namespace {

struct Device {
  Runtime cuda;
  Torch torch;
  VirtualMemory memory{torch.device};
};

struct Session {
  Workload workload;
  Mapped memory;
  std::unique_ptr<Place> place;

  // With the Workload come the memory of its outputs' addresses, with that of the arena behind them, and the arena.
  Session(const Message& message, const Device* device) {
    workload.read(message.reader());
    auto& given = message.descriptors;
    if (given.size() != 2) throw std::runtime_error("the judge shares no memory");
    size_t bytes = (workload.sets * workload.outputs.size() + 1) * sizeof(uint64_t);
    memory = Mapped(given[0], bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE);
    auto* addresses = reinterpret_cast<uint64_t*>(memory.base);
    if (device)
      place = std::make_unique<Cuda>(workload, given[1], addresses, device->cuda, device->memory, device->torch);
    else
      place = std::make_unique<Host>(workload, given[1], addresses);
  }
};

Report answer(Message& message, std::unique_ptr<Session>& session, PyObject* callable, const Device* device) {
  auto reader = message.reader();
  uint32_t operation = reader.u32();
  if (operation == OPEN) {
    session.reset();
    session = std::make_unique<Session>(message, device);
    return {};
  }
  if (!session) throw std::runtime_error("no Workload is open");
  switch (operation) {
    case PREPARE:
      return session->place->prepare(Run(message.reader(), session->workload), callable);
    case RUN:
      return session->place->run(Run(message.reader(), session->workload), callable);
    default: throw std::runtime_error("the judge asks for what this driver does not know");
  }
}

}  // namespace
}  // namespace kcap

// Does what the judge asks on `socket` until it closes its end, and stands still after each. The GIL is held throughout:
// threads of Python's run only inside the calls.
extern "C" void kcap_serve(int socket, int memory, PyObject* callable, void* device) {
  kcap::Message message;
  kcap::pieces.socket = socket;
  std::unique_ptr<kcap::Session> session;
  kcap::Mapped reported(memory, kcap::REPORT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED);
  kcap::system_call(SYS_close, memory);
  while (kcap::stand_still(), kcap::receive(socket, message)) {
    kcap::Report report;
    try {
      report = kcap::answer(message, session, callable, static_cast<kcap::Device*>(device));
    } catch (const kcap::Wrong& wrong) {
      report.code = wrong.code, report.text = wrong.what();
    } catch (const std::exception& error) {
      report.code = kcap::DRIVER, report.text = error.what();
    }
    if (session) report.iteration = session->place->invocation;
    message.close_descriptors();
    report.write(reported.base);
  }
}

// Of a GPU: `library`, the file name of CUDA's runtime, and `torch` (native/cuda.h's Torch). They are looked up before any
// code from elsewhere is here.
extern "C" void* kcap_open(const char* library, PyObject* torch) {
  try {
    Py_XINCREF(torch);
    auto* device = new kcap::Device{kcap::Runtime(library), kcap::Torch(torch)};
    kcap::pieces.memory = &device->memory;
    return device;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Of torch's CUDAPluggableAllocator: where the pool of outputs has its memory.
extern "C" void* kcap_take(size_t size, int, void*) {
  try {
    if (!kcap::pieces.memory) throw std::runtime_error("the GPU is not open yet");
    return kcap::pieces.take(size);
  } catch (const std::exception& error) {
    fprintf(stderr, "no memory for outputs: %s\n", error.what());
    return nullptr;
  }
}

extern "C" void kcap_give_back(void* base, size_t size, int, void*) { kcap::pieces.give_back(base, size); }
