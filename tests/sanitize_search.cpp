// Random beam searches with random Transformers (search.h, transformer.h), as in sanitize.cpp. Every hypothesis is scored
// again with plain loops.
#include <cstdlib>

#include "sanitize_layers.h"
#include "search.h"

using namespace regard;

namespace {

thread_local bool counted = false;  // the search's own allocations may fail too, not only those of the kernels

void refuse_if_none_left() {
  if (!counted || left < 0) return;
  if (left == 0) throw std::bad_alloc();
  --left;
}

using Rows = std::vector<Numbers>;

struct Block {
  Norm norms[3];
  Weights in_proj, out_proj, query, source, cross_out, ffn_in, ffn_out;
};

// An encoder or a decoder of random sizes.
struct Layers {
  Stack s{};
  std::vector<Block> blocks;
  Norm first, last;
  Floats tokens, positions;
  double scale;

  // memory: width of the vectors that the cross-attention reads.
  Layers(Dice& dice, int64_t vocabulary, int64_t length, int64_t memory)
      : first(dice, choose_sizes(dice)), last(dice, s.width), tokens(dice, vocabulary * s.width),
        positions(dice, length * s.width), scale(dice.chance(0.5) ? 1 : std::sqrt(double(s.width))) {
    const int64_t q = s.queries(), kv = s.key_values();
    const auto weights = [&](int64_t depth, int64_t columns) {
      return Weights(dice, depth, columns, dice.chance(0.5));
    };
    for (int64_t i = 0; i < s.layers; ++i)
      blocks.push_back({{Norm(dice, s.width), Norm(dice, s.width), Norm(dice, s.width)},
                        weights(s.width, q + kv), weights(q, s.width), weights(s.width, q), weights(memory, kv),
                        weights(q, s.width), weights(s.width, s.inner), weights(s.inner, s.width)});
    first.exists = dice.chance(0.3);
    last.exists = s.norm_first || dice.chance(0.3);
    tokens.fill([&] { return dice.normal(); });
    positions.fill([&] { return dice.normal(); });
  }

  int64_t choose_sizes(Dice& dice) {
    s.groups = dice.in(1, 3), s.per_group = dice.in(1, 2), s.head = dice.of({1, 3, 4, 7, 8, 9, 16, 17, 32, 40});
    s.width = dice.of({5, 8, 15, 16, 17, 32, 33, 64}), s.inner = dice.of({1, 5, 16, 31, 64});
    s.layers = dice.in(1, 2), s.norm_first = dice.chance(0.5), s.eps = 1e-5f;
    return s.width;
  }

  std::vector<Stack::Block> connect() {
    std::vector<Stack::Block> found;
    for (Block& b : blocks)
      found.push_back({{b.norms[0].norm(), b.norms[1].norm(), b.norms[2].norm()}, b.in_proj.layer(), b.out_proj.layer(),
                       b.query.layer(), b.source.layer(), b.cross_out.layer(), b.ffn_in.layer(), b.ffn_out.layer()});
    s.first = first.norm(), s.last = last.norm();
    return found;
  }
  TransformerModel::Embedding embedding() { return {tokens.data(), positions.data(), float(scale)}; }

  Numbers embed(int64_t token, int64_t position) {
    Numbers x;
    for (int64_t i = 0; i < s.width; ++i)
      x.push_back(double(tokens[token * s.width + i]) * scale + double(positions[position * s.width + i]));
    return first.apply(x, s.eps);
  }

  // Attention from one query to `rows`, which contain keys and values from column `at` on. Writes heads × rows weights.
  Numbers attend(const Numbers& query, const Rows& rows, int64_t at, Rows* weights = nullptr) {
    Numbers found;
    for (int64_t h = 0; h < s.groups * s.per_group; ++h) {
      const int64_t key = at + h / s.per_group * s.head, value = key + s.groups * s.head;
      Numbers scores;
      for (const Numbers& row : rows) {
        scores.push_back(0);
        for (int64_t d = 0; d < s.head; ++d)
          scores.back() += query[size_t(h * s.head + d)] * row[size_t(key + d)] / std::sqrt(double(s.head));
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - top);
      for (double& score : scores) score /= sum;
      for (int64_t d = 0; d < s.head; ++d) {
        found.push_back(0);
        for (size_t j = 0; j < rows.size(); ++j) found.back() += scores[j] * rows[j][size_t(value + d)];
      }
      if (weights) weights->push_back(scores);
    }
    return found;
  }

  template <class F>
  void residual(Norm& norm, Numbers& x, F f) {
    const Numbers y = f(s.norm_first ? norm.apply(x, s.eps) : x);
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    if (!s.norm_first) x = norm.apply(x, s.eps);
  }

  void feed_forward(Block& b, Numbers& x) {
    residual(b.norms[2], x, [&](const Numbers& x) {
      Numbers inner = b.ffn_in.apply(x);
      for (double& n : inner) n = std::max(n, 0.0);
      return b.ffn_out.apply(inner);
    });
  }
};

// A translation model, and the reference for its searches.
struct Model {
  static constexpr int64_t LONGEST = 24;  // source and target tokens
  int64_t source_vocabulary, vocabulary;
  Layers encoder, decoder;
  Weights output;

  explicit Model(Dice& dice)
      : source_vocabulary(dice.of({1, 7, 50})), vocabulary(dice.of({4, 5, 17, 65, 130})),
        encoder(dice, source_vocabulary, LONGEST, 1), decoder(dice, vocabulary, LONGEST, encoder.s.width),
        output(dice, decoder.s.width, vocabulary, dice.chance(0.5)) {}

  TransformerModel connect() {
    TransformerModel found{};
    found.encoder_blocks = encoder.connect(), found.decoder_blocks = decoder.connect();
    found.encoder = encoder.s, found.decoder = decoder.s;
    found.source = encoder.embedding(), found.target = decoder.embedding();
    found.output = output.layer(), found.vocabulary = vocabulary;
    return found;
  }

  Rows encode(const std::vector<int64_t>& tokens) {
    Rows x;
    for (size_t t = 0; t < tokens.size(); ++t) x.push_back(encoder.embed(tokens[t], int64_t(t)));
    for (Block& b : encoder.blocks) {
      Rows projected;
      for (const Numbers& row : x)
        projected.push_back(b.in_proj.apply(encoder.s.norm_first ? b.norms[0].apply(row, encoder.s.eps) : row));
      for (size_t t = 0; t < x.size(); ++t) {
        encoder.residual(b.norms[0], x[t], [&](const Numbers&) {
          return b.out_proj.apply(encoder.attend(projected[t], projected, encoder.s.queries()));
        });
        encoder.feed_forward(b, x[t]);
      }
    }
    for (Numbers& row : x) row = encoder.last.apply(row, encoder.s.eps);
    return x;
  }

  // The log probabilities of all tokens after each of `tokens`. weights: those of the recorded layer, heads × tokens.
  Rows decode(const std::vector<int32_t>& tokens, const Rows& memory, int64_t recorded, std::vector<Rows>& weights) {
    Rows found;
    std::vector<Rows> cached(decoder.blocks.size()), sources(decoder.blocks.size());
    for (size_t i = 0; i < decoder.blocks.size(); ++i)
      for (const Numbers& row : memory) sources[i].push_back(decoder.blocks[i].source.apply(row));
    for (size_t t = 0; t < tokens.size(); ++t) {
      Numbers x = decoder.embed(tokens[t], int64_t(t));
      for (size_t i = 0; i < decoder.blocks.size(); ++i) {
        Block& b = decoder.blocks[i];
        decoder.residual(b.norms[0], x, [&](const Numbers& x) {
          cached[i].push_back(b.in_proj.apply(x));
          return b.out_proj.apply(decoder.attend(cached[i].back(), cached[i], decoder.s.queries()));
        });
        decoder.residual(b.norms[1], x, [&](const Numbers& x) {
          Rows found;
          const Numbers y = decoder.attend(b.query.apply(x), sources[i], 0, &found);
          if (int64_t(i) == recorded) weights.push_back(found);
          return b.cross_out.apply(y);
        });
        decoder.feed_forward(b, x);
      }
      Numbers logits = output.apply(decoder.last.apply(x, decoder.s.eps));
      const double top = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (double logit : logits) sum += std::exp(logit - top);
      for (double& logit : logits) logit -= top + std::log(sum);
      found.push_back(logits);
    }
    return found;
  }
};

struct Trial {
  Dice dice;
  Judge judge;
  Mode mode;
  int64_t refused = 0;
  Model model;
  SearchOptions options{};
  std::vector<SearchSentence> sentences;
  int threads = 1;

  Trial(int64_t number, Mode mode) : dice{uint64_t(number) * 7919 + 5}, judge{number, ""}, mode(mode), model(dice) {
    const int64_t words = model.vocabulary, start = dice.in(1, 3);
    options.size = dice.of({1, 1, 2, 3, 5, 8, 200}), options.n_best = dice.in(1, options.size);
    options.length_penalty = dice.chance(0.5) ? 1 : 0.3;
    options.prune_threshold = dice.chance(0.8) ? INFINITE : 2;
    options.suppressed = dice.in(0, 2), options.end = options.suppressed, options.unknown = words - 1;
    options.recorded = dice.chance(0.5) ? -1 : dice.in(0, model.decoder.s.layers - 1);
    for (int64_t i = 0; i < start; ++i) options.start.push_back(dice.in(0, words - 1));
    threads = int(dice.of({1, 3}));
    const int64_t count = dice.of({1, 2, 3, 4, 8, 9, 17, 40});
    for (int64_t i = 0; i < count; ++i) {
      SearchSentence sentence{{}, dice.of({0, 1, 2, 5, 9}), dice.of({-1, -1, 0, 1})};
      for (int64_t n = dice.in(1, count > 9 ? 3 : Model::LONGEST); n; --n)
        sentence.tokens.push_back(dice.in(0, model.source_vocabulary - 1));
      if (mode == Mode::poison) sentence.limit = start;  // the decoder must be used
      sentences.push_back(sentence);
    }
    const Stack &e = model.encoder.s, &d = model.decoder.s;
    judge.say("search", {count, threads, options.size, words, start, e.width, e.groups, e.per_group, e.head, e.inner,
                         e.norm_first, d.width, d.groups, d.per_group, d.head, d.inner, d.norm_first});
  }

  // Returns whether the results are valid.
  bool search(std::vector<SearchResult>& results) {
    const TransformerModel connected = model.connect();
    struct Counted {
      Counted() { counted = true; }
      ~Counted() { counted = false; }
    } const guard;
    Search search(kernels, connected, options, sentences, threads);
    while (!search.run(dice.chance(0.5) ? 0 : 60)) {}
    results = search.results();
    return search.is_valid();
  }

  void poison() {
    Layers& layers = dice.chance(0.5) ? model.encoder : model.decoder;
    Block& b = layers.blocks[size_t(dice.in(0, int64_t(layers.blocks.size()) - 1))];
    const bool crosses = &layers == &model.decoder;
    Weights* all[] = {&b.in_proj, &b.out_proj, &b.ffn_in, &b.ffn_out, &model.output, &b.query, &b.source, &b.cross_out};
    Weights& w = *all[dice.in(0, crosses ? 7 : 4)];
    const int64_t token = crosses ? options.start[0] : sentences.back().tokens.back();
    const float bad = dice.chance(0.7) ? NAN : float(INFINITE);
    if (dice.chance(0.3)) layers.tokens[token * layers.s.width + dice.in(0, layers.s.width - 1)] = bad;
    else if (w.int8) w.scales[dice.in(0, w.columns - 1)] = NAN;
    else w.weight[dice.in(0, w.columns * w.depth - 1)] = NAN;
    std::vector<SearchResult> results;
    judge.expect(!search(results), "a result is not finite, and the search does not say so");
  }

  // Lets allocations of the search fail: each of the first ones, then fewer and fewer.
  void exhaust() {
    for (int64_t allowed = 0, done = 0; !done; allowed += 1 + allowed / 8) {
      left = allowed;
      std::thread([&] {
        try {
          std::vector<SearchResult> results;
          search(results);
          done = 1;
        } catch (const std::bad_alloc&) {
          ++refused;
        }
      }).join();
      left = -1;
    }
  }

  void check(const SearchResult& r, const Rows& memory) {
    const SearchSentence& sentence = sentences[size_t(r.sentence)];
    const size_t start = options.start.size(), n = r.tokens.size() - 1;
    judge.expect(n >= start - 1 && std::equal(options.start.begin(), options.start.end(), r.tokens.begin()),
                 "a result does not begin with the start tokens");
    judge.expect(int64_t(n) <= std::max(sentence.limit, int64_t(start) - 1), "a result is too long");
    judge.expect(r.finished ? n >= start && r.tokens[n] == options.end : int64_t(n) >= sentence.limit,
                 "a result is neither finished nor at its limit");
    std::vector<Rows> weights;
    const Rows wanted = model.decode({r.tokens.begin(), r.tokens.end() - 1}, memory, options.recorded, weights);
    double total = 0, within = 1e-3;
    int64_t unknown = std::count(options.start.begin(), options.start.end(), options.unknown);
    for (size_t t = start - 1; t < n && !judge.bad; ++t) {
      const int64_t token = r.tokens[t + 1];
      judge.expect(token >= options.suppressed && token < model.vocabulary, "a token is out of range");
      if (judge.bad) return;
      judge.expect(t + 1 == n || token != options.end, "a result continues after its end");
      const bool full = sentence.max_unknown >= 0 && unknown >= sentence.max_unknown;
      judge.expect(!full || token != options.unknown, "a result has too many unknown tokens");
      unknown += token == options.unknown;
      const double value = wanted[t][size_t(token)];
      total += value;
      within += 1e-2 * (1 + std::fabs(value));
      for (int64_t other = options.suppressed; options.size == 1 && other < model.vocabulary; ++other)
        judge.expect((full && other == options.unknown) || wanted[t][size_t(other)] <= value + within,
                     "greedy decoding does not choose the most probable token");
    }
    judge.near(r.total, total, within, "log probability");
    if (options.recorded < 0) return;
    const size_t heads = size_t(model.decoder.s.groups * model.decoder.s.per_group), source = sentence.tokens.size();
    judge.expect(r.weights.size() == heads * n * source, "the number of weights is wrong");
    for (size_t h = 0; h < heads && !judge.bad; ++h)
      for (size_t t = 0; t < n; ++t) {
        double sum = 0;
        for (size_t j = 0; j < source; ++j) {
          const double weight = r.weights[(h * n + t) * source + j];
          sum += weight;
          judge.near(weight, weights[t][h][j], 1e-2, "a weight");
        }
        judge.near(sum, 1, 1e-5, "the sum of weights");
      }
  }

  void run() {
    if (mode == Mode::poison) return poison();
    if (mode == Mode::exhaust) exhaust();
    std::vector<SearchResult> results, others;
    backwards = true;
    judge.expect(search(others), "all is finite, and the search does not say so");
    backwards = false;
    judge.expect(search(results), "all is finite, and the search does not say so");
    judge.expect(results.size() == others.size(), "the order of the work changes the number of results");
    std::vector<Rows> memories;
    for (const SearchSentence& sentence : sentences) memories.push_back(model.encode(sentence.tokens));
    std::vector<char> has(sentences.size());
    for (size_t i = 0; i < results.size() && !judge.bad; ++i) {
      const SearchResult &r = results[i], &other = others[i];
      judge.expect(r.sentence == other.sentence && r.tokens == other.tokens && r.total == other.total &&
                       r.finished == other.finished && r.weights == other.weights,
                   "the order of the work changes a result");
      has[size_t(r.sentence)] = true;
      check(r, memories[size_t(r.sentence)]);
    }
    judge.expect(std::count(has.begin(), has.end(), true) == int64_t(has.size()), "a sentence has no result");
  }
};

}  // namespace

void* operator new(size_t bytes) {
  refuse_if_none_left();
  if (void* found = malloc(bytes ? bytes : 1)) return found;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return malloc(bytes ? bytes : 1); }
void operator delete(void* at) noexcept { free(at); }
void operator delete(void* at, size_t) noexcept { free(at); }

int64_t check_search(int64_t rounds, Mode mode, int64_t& refused) {
  int64_t failed = 0;
  for (int64_t number = 0; number < rounds; ++number) {
    Trial trial(number, mode);
    trial.run();
    failed += trial.judge.bad;
    refused += trial.refused;
  }
  return failed;
}
