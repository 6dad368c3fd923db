// Attention from a few rows to many keys: the keys are split into parts so that all threads have work, and the partial
// results are merged.
//
// The number of parts depends only on the sizes, never on the number of threads.
#pragma once

#include "forward.h"

namespace regard {
namespace {

// Memory for partial results, freed even if a part throws.
struct Parts {
  float* at;

  explicit Parts(int64_t count) {
    void* fresh = nullptr;
    const size_t bytes = size_t(count) * sizeof(float);
    if (posix_memalign(&fresh, 64, bytes)) out_of_memory(bytes);
    at = static_cast<float*>(fresh);
  }
  Parts(const Parts&) = delete;
  ~Parts() { free(at); }
};

struct Split : Job {
  int64_t parts, stride;
  float* partials;  // for each item and part: sums [lane][stride], then the maximum and total of each lane

  float* at(int64_t item, int64_t part) const { return partials + (item * parts + part) * LANES * (stride + 2); }
};

inline int64_t parts_of(const Problem& p, const Plan& plan) {
  constexpr int64_t MIN_ITEMS = 16, MIN_KEYS = 8 * KEYS;
  const int64_t items = p.units() * plan.chunks;
  const bool breaks = p.terms == 1 && p.start[0] && p.stop[0];
  if (items >= MIN_ITEMS || items == 0 || plan.chunk > LANES || breaks || p.keys < 2 * MIN_KEYS) return 1;
  const int64_t needed = (MIN_ITEMS + items - 1) / items, max_parts = p.keys / MIN_KEYS;
  return needed < max_parts ? needed : max_parts;
}

inline void split_item(void* context, int64_t index) {
  Split& job = *static_cast<Split*>(context);
  const int64_t item = index / job.parts, part = index % job.parts;
  const Span span = job.plan.item(item);
  const ItemScratch scratch;
  const TileScope tiles_in_use(job.p);
  const Block b(job.p, span.unit, span.first, span.last - span.first);
  const Softmax policy(job.p);
  Running run(b, part == 0 && job.p.sink);
  Output output(b);
  const int64_t tiles = (b.high - b.low + KEYS - 1) / KEYS;
  const int64_t low = b.low + tiles * part / job.parts * KEYS, high = b.low + tiles * (part + 1) / job.parts * KEYS;
  sum_softly(b, policy, low, high < b.high ? high : b.high, run, output);
  float* to = job.at(item, part);
  for (int64_t i = 0; i < b.count * job.stride; ++i) to[i] = output.begun ? output.sums[i] : 0;
  to += LANES * job.stride;
  memcpy(to, run.top.at, sizeof run.top.at);
  memcpy(to + LANES, run.total.at, sizeof run.total.at);
  Finite finite;
  if (b.overflowed) finite.fail();
  job.report(finite);
}

inline void merge_item(void* context, int64_t item) {
  Split& job = *static_cast<Split*>(context);
  const Span span = job.plan.item(item);
  const ItemScratch scratch;
  const Block b(job.p, span.unit, span.first, span.last - span.first);
  const Softmax policy(job.p);
  Running all(b, false);
  Output output(b);
  PerLane old, now;
  for (int64_t part = 0; part < job.parts; ++part) {
    const float* from = job.at(item, part);
    const float* row = from + LANES * job.stride;
    for (int v = 0; v < b.lanes; v += W) {
      const vec top = max(all.top.get(v), load(row + v)), known = top == -INF ? vec{} : top;
      old.set(v, policy.power(all.top.get(v) - known));
      now.set(v, policy.power(load(row + v) - known));
      all.total.set(v, all.total.get(v) * old.get(v) + load(row + LANES + v) * now.get(v));
      all.top.set(v, top);
    }
    for (int i = 0; i < b.count; ++i)
      for (int64_t t = 0; t < job.stride; t += W) {
        float* to = output.sums + i * job.stride + t;
        const vec more = load(from + i * job.stride + t) * now.at[i];
        store(to, part ? load(to) * old.at[i] + more : more);
      }
  }
  output.begun = true;
  Tau tau;
  PerLane inverse;
  Finite finite;
  all.finish(b, policy, tau, inverse);
  see_tau(b, tau, finite);
  write_tau(b, tau);
  output.write(b, inverse.at, finite);
  job.report(finite);
}

inline bool forward_softmax(const Problem& p, int threads) {
  const Plan plan(p);
  const int64_t parts = parts_of(p, plan), items = p.units() * plan.chunks;
  if (parts == 1) return forward_all<Softmax>(p, threads);
  const int64_t stride = padded(p.value_width);
  const Parts partials(items * parts * LANES * (stride + 2));
  Split job{{p, plan}, parts, stride, partials.at};
  parallel(items * parts, threads, split_item, &job);
  parallel(items, threads, merge_item, &job);
  return job.finite;
}

}  // namespace
}  // namespace regard
