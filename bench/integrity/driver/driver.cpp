// The part of a candidate's process that the judge talks to: it fills inputs, calls the Solution between two readings of
// the clock, and copies outputs out. Once a Solution's code has run here, nothing that Python says is asked for.
//
// What it cannot hold: code in the same process can overwrite it. So the judge believes its times only as far as its
// own clock bounds them, and only for outputs that are right (kcap.bench.judge).
#include "native/host.h"

namespace kcap {
namespace {

enum Operation : uint32_t { OPEN = 1, RUN = 2, CHECK = 3 };

struct Session {
  Workload workload;
  Mapped pool, shared;
  std::unique_ptr<Host> host;

  explicit Session(const Message& message) {
    if (message.descriptors.size() != 2) throw std::runtime_error("the judge shares no memory");
    workload.read(message.reader());
    pool = Mapped(message.descriptors[0], workload.pool_bytes, PROT_READ, MAP_SHARED);
    shared = Mapped(message.descriptors[1], workload.shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    for (int descriptor : message.descriptors) close(descriptor);
    host = std::make_unique<Host>(workload, pool.base);
  }
};

Answer answer(const Message& message, std::unique_ptr<Session>& session, PyObject* callable, PyObject* watched) {
  auto reader = message.reader();
  switch (reader.u32()) {
    case OPEN:
      session.reset();
      session = std::make_unique<Session>(message);
      return {};
    case RUN:
      if (!session) throw std::runtime_error("no Workload is open");
      return session->host->run(Run(message.reader(), session->workload), callable, session->shared.base);
    case CHECK: {
      Answer out;
      out.text = replaced(watched);
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
extern "C" void kcap_serve(int socket, PyObject* callable, PyObject* watched) {
  kcap::Message message;
  std::unique_ptr<kcap::Session> session;
  while (kcap::receive(socket, message)) {
    kcap::Answer answer;
    try {
      answer = kcap::answer(message, session, callable, watched);
    } catch (const kcap::Wrong& wrong) {
      answer.code = wrong.code, answer.text = wrong.what();
    } catch (const std::exception& error) {
      answer.code = kcap::DRIVER, answer.text = error.what();
    }
    answer.send(socket);
  }
}
