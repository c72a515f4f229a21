// A step's Program, and how often it ran.
#pragma once
#include "interning.h"

namespace kcap {

uint32_t intern_program(const std::vector<Entry*>& program) {
  Mixer key, base;
  for (const Entry* e : program) {
    key.add(e->id);
    base.add(e->base.a);
  }
  auto [it, fresh] = g->programs.try_emplace(key.hash(), g->programs.size());
  if (!fresh) return it->second;
  std::string line = "{\"t\":\"program\",\"id\":" + std::to_string(it->second) + ",\"calls\":[";
  for (size_t i = 0; i < program.size(); i++) line += (i ? "," : "") + std::to_string(program[i]->id);
  g->shard.write(line + "]}\n");
  auto [like, first] = g->shapes.try_emplace(base.hash());
  if (first && (g->program_words += program.size()) < kMaxProgramWords) like->second = program;
  else for (size_t i = 0; i < std::min(like->second.size(), program.size()); i++)
    if (like->second[i] != program[i]) note_drift(*like->second[i], *program[i]);
  return it->second;
}

// Counts an ended step: as one more of its batch, or call by call once the table of batches is full.
void count_step(Thread& t, int64_t tokens, int64_t sequences, const char* details) {
  std::lock_guard<std::mutex> guard(g->mutex);
  const uint64_t index = g->steps++;
  const bool full = g->batches.size() >= kMaxBatches || g->program_words >= kMaxProgramWords;
  if (full || t.program.size() > kMaxProgram) {
    count_loose(t);
    g->shard.header(static_cast<Header>(hLooseSteps + t.phase))++;
    g->shard.header(hSteps)++;
    return;
  }
  const uint32_t program = intern_program(t.program);
  Mixer key;
  for (uint64_t word : {uint64_t{program}, uint64_t{t.phase}, static_cast<uint64_t>(tokens), static_cast<uint64_t>(sequences)}) key.add(word);
  auto [it, fresh] = g->batches.try_emplace(key.hash(), g->batches.size());
  const std::string shape = ",\"program\":" + std::to_string(program) + ",\"phase\":" + std::to_string(t.phase) +
                            ",\"tokens\":" + std::to_string(tokens) + ",\"sequences\":" + std::to_string(sequences);
  if (fresh) g->shard.write("{\"t\":\"batch\",\"id\":" + std::to_string(it->second) + shape + "}\n");
  if (details && *details) g->shard.write("{\"t\":\"step\",\"index\":" + std::to_string(index) + shape + details + "}\n");
  g->shard.batch(it->second)++;
  g->shard.header(hSteps)++;
}

}  // namespace kcap
