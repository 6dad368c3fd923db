// Random problems for the decoding kernels, as in sanitize.cpp: linear layers in float32 and int8 (linear.h), the
// most probable tokens (vocabulary.h), elementwise dropout (dropout.h) and whole decoder steps (decoder_step.h).
#include <climits>

#include "sanitize_layers.h"

using namespace regard;

namespace {

struct Trial {
  Dice dice;
  Judge judge;
  Mode mode;
  int64_t refused = 0;

  double bad() { return dice.chance(0.5) ? NAN : dice.chance(0.5) ? INFINITE : -INFINITE; }

  // Runs a kernel in both orders of its items; the bits it writes must be the same.
  template <class Kernel, class T>
  void run(Kernel kernel, Buffer<T>& written) {
    if (mode == Mode::exhaust) {
      const int64_t failed = ::exhaust(kernel);
      judge.expect(failed >= 0, "a kernel never has enough memory");
      refused += failed;
    }
    backwards = false;
    kernel();
    const Buffer<T> first = written;
    backwards = true;
    kernel();
    judge.expect(written == first, "the order of the work changes bits");
  }

  void linear(bool int8) {
    int64_t rows = dice.of({1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 40, 191, 200, 300});
    const int64_t depth = dice.of({1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 300, 1025, 4096});
    const int64_t columns = dice.of({1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129, 700});
    while (rows > 1 && rows * depth * columns > 1000000) rows /= 2;
    judge.say(int8 ? "int8 linear" : "linear", {rows, depth, columns});
    Weights weights(dice, depth, columns, int8);
    Floats x(dice, rows * depth), out(dice, rows * columns);
    const double size = dice.of({1, 1, 1, 1000});
    const bool equal = dice.chance(0.2);
    x.fill([&] { return size * (equal ? 1 : dice.normal()); });
    const int64_t zero = dice.in(0, rows - 1), broken = mode == Mode::poison ? dice.in(0, rows - 1) : -1;
    for (int64_t i = 0; i < depth; ++i) x[zero * depth + i] = dice.chance(0.5) ? 0.0f : 1e-38f;
    if (broken >= 0) x[broken * depth + dice.in(0, depth - 1)] = float(bad());
    const Step::Layer l = weights.layer();
    const bool transposed = !int8 && dice.chance(0.3);
    Floats by_depth(dice, transposed ? depth * columns : 0);
    for (int64_t i = 0; i < by_depth.size(); ++i) by_depth[i] = float(weights.get(i % columns, i / columns));
    const void* weight = transposed ? by_depth.data() : l.weight;
    const auto call = [&](const float* from, float* to, int64_t count) {
      const Linear layer = {from, weight, l.scales, l.bias, to, count, depth, columns, transposed};
      (int8 ? kernels.linear_int8 : kernels.linear)(layer, 4);
    };
    run([&] { call(x.data(), out.data(), rows); }, out);
    const double limit = std::min<double>(INT16_MAX, double(INT32_MAX / (127 * 2 * weights.pairs)));
    for (int64_t r = 0; r < rows; ++r) {
      double top = 0;
      for (int64_t i = 0; i < depth; ++i) top = std::max(top, std::fabs(double(x[r * depth + i])));
      for (int64_t c = 0; c < columns; ++c) {
        const double found = out[r * columns + c];
        if (r == broken) {
          judge.expect(!std::isfinite(found), "a row of NaN or infinity gives a number");
          continue;
        }
        double wanted = weights.biased ? double(weights.bias[c]) : 0, sizes = std::fabs(wanted), rounded = 0;
        for (int64_t i = 0; i < depth; ++i) {
          const double w = weights.get(c, i), product = double(x[r * depth + i]) * w;
          wanted += product;
          sizes += std::fabs(product);
          rounded += std::fabs(w) * top / limit * 0.51;  // each number of x is rounded to a multiple of top / limit
        }
        // subnormal numbers round more, and int8 treats rows of numbers below 1e-30 as zeros
        judge.near(found, wanted, 4e-6 * sizes + (int8 ? rounded : 0) + 1e-30, "output");
      }
    }
    if (!int8) return;
    const int64_t row = dice.in(0, rows - 1);
    Floats alone(dice, columns), single(dice, depth);
    for (int64_t i = 0; i < depth; ++i) single[i] = x[row * depth + i];
    call(single.data(), alone.data(), 1);
    judge.expect(!memcmp(alone.data(), out.data() + row * columns, size_t(columns) * sizeof(float)),
                 "a row depends on the other rows");
  }

  void best() {
    const int64_t rows = dice.of({1, 2, 3, 4, 5, 9});
    const int64_t columns = dice.of({1, 2, 3, 15, 16, 17, 63, 64, 65, 66, 127, 128, 129, 200, 1000, 5003});
    const int64_t first = std::min<int64_t>(dice.of({0, 0, 1, 3, 17, 70}), columns - 1);
    const int64_t k = std::min<int64_t>(dice.of({1, 2, 5, 8, 70}), columns - first);
    judge.say("best", {rows, columns, first, k});
    Floats logits(dice, rows * columns), values(dice, rows * k);
    Buffer<int64_t> tokens(dice, rows * k);
    const bool ties = dice.chance(0.3), hides = dice.chance(0.3);
    const double size = dice.of({1, 5, 50});
    logits.fill([&] {
      const double x = size * dice.normal();
      return hides && dice.chance(0.3) ? -INFINITE : ties ? std::round(x) : x;
    });
    for (int64_t r = 0; r < rows; ++r) logits[r * columns + dice.in(first, columns - 1)] = 0.5f;
    const int64_t broken = mode == Mode::poison ? dice.in(0, rows - 1) : -1;
    if (broken >= 0) logits[broken * columns + dice.in(0, columns - 1)] = float(dice.chance(0.5) ? NAN : INFINITE);
    const Best b = {logits.data(), values.data(), tokens.data(), rows, columns, first, k};
    run([&] { kernels.best(b, 4); }, values);
    for (int64_t r = 0; r < rows; ++r) {
      const auto logit = [&](int64_t i) { return double(logits[r * columns + i]); };
      std::vector<int64_t> order;
      double top = -INFINITE, sum = 0;
      for (int64_t i = 0; i < columns; ++i) {
        top = std::max(top, logit(i));
        if (i >= first) order.push_back(i);
      }
      for (int64_t i = 0; i < columns; ++i) sum += std::exp(logit(i) - top);
      if (r != broken)
        std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return logit(i) > logit(j); });
      for (int64_t i = 0; i < k; ++i) {
        const double found = values[r * k + i];
        const int64_t token = tokens[r * k + i];
        judge.expect(token >= first && token < columns, "a token is out of range");
        if (r == broken) {
          judge.expect(std::isnan(found), "a row of NaN or infinity gives a number");
          continue;
        }
        const double wanted = logit(order[size_t(i)]) - top - std::log(sum);
        judge.near(found, wanted, 1e-5 * (1 + size), "log probability");
        judge.expect(wanted == -INFINITE || token == order[size_t(i)], "another token is more probable");
      }
    }
  }

  void dropout() {
    const int64_t size = dice.of({0, 1, 3, 4, 5, 7, 8, 9, 15, 17, 33, 1000, 32767, 32769, 40001});
    const auto kind = Drop::Kind(dice.in(0, 2));
    judge.say("dropout", {size, kind});
    Floats x(dice, size), y(dice, size), out(dice, size);
    x.fill([&] { return dice.normal(); });
    y.fill([&] { return dice.normal(); });
    const bool alone = kind != Drop::relu_back && dice.chance(0.5);
    const double share = dice.chance(0.5) ? 0.1 : 0.6;
    const auto numbers = [](Floats& x) { return Drop::Numbers{reinterpret_cast<char*>(x.data()), false}; };
    const Drop d = {kind, alone ? Drop::Numbers{} : numbers(x), numbers(y), numbers(out), size, uint32_t(dice.next()),
                    uint32_t(dice.next()), uint32_t(share * 4294967296.0), float(1 / (1 - share))};
    run([&] { kernels.dropout(d, 4); }, out);
    for (int64_t i = 0; i < size; ++i) {
      const double before = alone ? 0 : double(x[i]), scaled = double(y[i]) * double(d.kept);
      const double kept = mix(mix(uint32_t(i) ^ d.seed) ^ d.other) >= d.threshold ? scaled : 0;
      const double wanted = kind == Drop::add    ? before + kept
                            : kind == Drop::relu ? std::max(kept, 0.0)
                                                 : (before > 0 ? scaled : 0);
      judge.near(out[i], wanted, 1e-6 * (1 + std::fabs(before) + std::fabs(scaled)), "dropout");
    }
  }

  void step();
};

// A decoder of random sizes, its caches, and one step computed with plain loops.
struct Decoder {
  struct Block {
    Norm norms[3];
    Weights in_proj, out_proj, query, cross_out, ffn_in, ffn_out;
    Floats cache, source, queries;
    bool recorded;
  };

  Dice& dice;
  Step s{};
  int64_t heads, row;
  bool any_int8 = false;
  std::vector<Block> blocks;
  std::vector<Norm> norm;
  std::vector<Weights> output;
  std::vector<Step::Block> addresses;
  Buffer<int64_t> index, lengths;
  std::vector<int64_t> source_of;  // per row
  Floats x, logits, normed, y, projected, attended, hidden, spread;

  explicit Decoder(Dice& dice) : dice(dice) {
    s.groups = dice.in(1, 3), s.per_group = dice.in(1, 3), s.head = dice.of({1, 3, 4, 7, 8, 9, 16, 17});
    s.width = dice.of({1, 3, 8, 15, 16, 17, 33, 64}), s.inner = dice.of({1, 5, 16, 31, 64, 130});
    s.vocabulary = dice.of({1, 2, 15, 16, 17, 100, 333});
    s.capacity = dice.of({1, 2, 5, 9, 40}), s.length = dice.in(0, s.capacity - 1);
    s.sources = dice.in(1, 4), s.slots = dice.in(1, 3), s.keys = dice.of({1, 2, 5, 16, 17, 33});
    s.norm_first = dice.chance(0.5), s.eps = 1e-5f, s.layers = dice.in(1, 3);
    heads = s.groups * s.per_group * s.head, row = 2 * s.groups * s.head;
    choose_rows();
    lengths.make(dice, s.sources);
    lengths.fill([&] { return dice.in(1, s.keys); });
    for (int64_t i = 0; i < s.layers; ++i) blocks.push_back(block());
    norm.emplace_back(dice, s.width);
    norm[0].exists = dice.chance(0.5);
    output.push_back(weights(s.width, s.vocabulary));
    x.make(dice, s.rows * s.width);
    x.fill([&] { return dice.normal(); });
    logits.make(dice, s.rows * s.vocabulary);
    scratch();
    connect();
  }

  // Every slot of every source, or some slots in any order.
  void choose_rows() {
    const bool all = dice.chance(0.4);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < s.sources * s.slots; ++i) places.push_back(i);
    if (!all) {
      for (size_t i = places.size() - 1; i > 0; --i) std::swap(places[i], places[size_t(dice.in(0, int64_t(i)))]);
      places.resize(size_t(dice.in(1, int64_t(places.size()))));
      index.make(dice, int64_t(places.size()));
      for (size_t i = 0; i < places.size(); ++i) index[int64_t(i)] = places[i];
    }
    for (int64_t place : places) source_of.push_back(place / s.slots);
    s.rows = int64_t(places.size());
  }

  Weights weights(int64_t depth, int64_t columns) {
    const bool int8 = dice.chance(0.5);
    any_int8 |= int8;
    return {dice, depth, columns, int8};
  }

  Block block() {
    Block b{{Norm(dice, s.width), Norm(dice, s.width), Norm(dice, s.width)},
            weights(s.width, heads + row),
            weights(heads, s.width),
            weights(s.width, heads),
            weights(heads, s.width),
            weights(s.width, s.inner),
            weights(s.inner, s.width),
            {dice, s.rows * s.capacity * row},
            {dice, s.sources * s.keys * row},
            {dice, s.rows * s.capacity * heads},
            dice.chance(0.3)};
    // numbers only where the step may read: the rest of both caches stays NaN
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t i = 0; i < s.length * row; ++i) b.cache[r * s.capacity * row + i] = float(dice.normal());
    for (int64_t r = 0; r < s.sources; ++r)
      for (int64_t i = 0; i < lengths[r] * row; ++i) b.source[r * s.keys * row + i] = float(dice.normal());
    return b;
  }

  void scratch() {
    normed.make(dice, s.rows * s.width), y.make(dice, s.rows * s.width);
    projected.make(dice, s.rows * (heads + row)), attended.make(dice, s.rows * heads);
    hidden.make(dice, s.rows * s.inner);
    if (index.size()) spread.make(dice, 2 * s.sources * s.slots * heads);
  }

  void connect() {
    for (Block& b : blocks) {
      Step::Block found{};
      for (int i = 0; i < 3; ++i) found.norms[i] = b.norms[i].norm();
      found.in_proj = b.in_proj.layer(), found.out_proj = b.out_proj.layer(), found.query = b.query.layer();
      found.cross_out = b.cross_out.layer(), found.ffn_in = b.ffn_in.layer(), found.ffn_out = b.ffn_out.layer();
      found.cache = b.cache.data(), found.source = b.source.data();
      found.queries = b.recorded ? b.queries.data() : nullptr;
      addresses.push_back(found);
    }
    s.blocks = addresses.data(), s.norm = norm[0].norm(), s.output = output[0].layer();
    s.index = index.size() ? index.data() : nullptr, s.lengths = lengths.data();
    s.x = x.data(), s.logits = logits.data(), s.normed = normed.data(), s.y = y.data();
    s.projected = projected.data(), s.attended = attended.data(), s.hidden = hidden.data(), s.spread = spread.data();
  }

  // Softmax attention from one query to the first `count` keys and values.
  Numbers attend(const Numbers& query, Floats& keys, int64_t first, int64_t count) {
    Numbers found(static_cast<size_t>(heads));
    for (int64_t h = 0; h < s.groups * s.per_group; ++h) {
      const int64_t group = h / s.per_group * s.head;
      Numbers scores;
      for (int64_t j = 0; j < count; ++j) {
        double score = 0;
        for (int64_t d = 0; d < s.head; ++d)
          score += query[size_t(h * s.head + d)] * double(keys[first + j * row + group + d]);
        scores.push_back(score / std::sqrt(double(s.head)));
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double score : scores) sum += std::exp(score - top);
      for (int64_t j = 0; j < count; ++j)
        for (int64_t d = 0; d < s.head; ++d)
          found[size_t(h * s.head + d)] += std::exp(scores[size_t(j)] - top) / sum *
                                           double(keys[first + j * row + s.groups * s.head + group + d]);
    }
    return found;
  }

  template <class F>
  void residual(Norm& norm, Numbers& x, F f) {
    const Numbers y = f(s.norm_first ? norm.apply(x, s.eps) : x);
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    if (!s.norm_first) x = norm.apply(x, s.eps);
  }

  // The logits of a row. `place`: index of its new token in the caches, written by the step.
  Numbers solve(Numbers x, int64_t r, Judge& judge, double within) {
    const int64_t place = (r * s.capacity + s.length);
    for (Block& b : blocks) {
      residual(b.norms[0], x, [&](const Numbers& x) {
        const Numbers all = b.in_proj.apply(x);
        for (int64_t i = 0; i < row; ++i)
          judge.near(b.cache[place * row + i], all[size_t(heads + i)], within * (1 + std::fabs(all[size_t(heads + i)])),
                     "a cached key or value");
        const Numbers query(all.begin(), all.begin() + heads);
        return b.out_proj.apply(attend(query, b.cache, r * s.capacity * row, s.length + 1));
      });
      residual(b.norms[1], x, [&](const Numbers& x) {
        const Numbers query = b.query.apply(x);
        for (int64_t i = 0; b.recorded && i < heads; ++i)
          judge.near(b.queries[place * heads + i], query[size_t(i)], within * (1 + std::fabs(query[size_t(i)])),
                     "a recorded query");
        const int64_t source = source_of[size_t(r)];
        return b.cross_out.apply(attend(query, b.source, source * s.keys * row, lengths[source]));
      });
      residual(b.norms[2], x, [&](const Numbers& x) {
        Numbers inner = b.ffn_in.apply(x);
        for (double& n : inner) n = std::max(n, 0.0);
        return b.ffn_out.apply(inner);
      });
    }
    return output[0].apply(norm[0].apply(x, s.eps));
  }
};

void Trial::step() {
  Decoder decoder(dice);
  Step& s = decoder.s;
  judge.say("step", {s.rows, s.width, s.groups, s.per_group, s.head, s.inner, s.vocabulary, s.length, s.capacity,
                     s.sources, s.slots, s.keys, s.layers, s.norm_first, decoder.index.size()});
  if (mode == Mode::poison) {
    const int64_t r = dice.in(0, s.rows - 1);
    Decoder::Block& b = decoder.blocks[size_t(dice.in(0, s.layers - 1))];
    const int64_t cached = s.length * decoder.row;
    if (dice.chance(0.3) && cached) b.cache[r * s.capacity * decoder.row + dice.in(0, cached - 1)] = NAN;
    else if (dice.chance(0.5)) b.source[decoder.source_of[size_t(r)] * s.keys * decoder.row] = NAN;
    else decoder.x[r * s.width + dice.in(0, s.width - 1)] = NAN;
    judge.expect(!kernels.step(s, 4), "a step is not finite, and the kernel does not say so");
    return;
  }
  const Floats before = decoder.x;
  bool finite = true;
  run(
      [&] {
        decoder.x = before;
        s.x = decoder.x.data();
        finite = kernels.step(s, 4);
      },
      decoder.logits);
  judge.expect(finite, "all is finite, and the kernel does not say so");
  Floats x = before;
  const double within = decoder.any_int8 ? 4e-3 : 3e-4;  // int8: rounded inputs
  for (int64_t r = 0; r < s.rows && !judge.bad; ++r) {
    const Numbers wanted =
        decoder.solve(Numbers(x.data() + r * s.width, x.data() + (r + 1) * s.width), r, judge, within);
    for (int64_t v = 0; v < s.vocabulary; ++v)
      judge.near(decoder.logits[r * s.vocabulary + v], wanted[size_t(v)], within * (1 + std::fabs(wanted[size_t(v)])),
                 "a logit");
  }
}

}  // namespace

int64_t check_decoding(int64_t rounds, Mode mode, int64_t& refused) {
  int64_t failed = 0;
  for (int64_t number = 0; number < rounds; ++number) {
    Trial trial{{uint64_t(number) * 6007 + 3}, {number, ""}, mode};
    trial.linear(false);
    trial.linear(true);
    trial.best();
    trial.dropout();
    trial.step();
    failed += trial.judge.bad;
    refused += trial.refused;
  }
  return failed;
}
