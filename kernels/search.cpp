#include "search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>

namespace regard {
namespace {

using Clock = std::chrono::steady_clock;

void embed(const TransformerModel::Embedding& e, int64_t token, int64_t position, int64_t width, float* to) {
  const float *from = e.tokens + token * width, *shift = e.positions + position * width;
  for (int64_t i = 0; i < width; ++i) to[i] = from[i] * e.scale + shift[i];
}

// Returns uninitialized memory that is freed even if the vector that will own it cannot grow.
std::unique_ptr<float[]> allocate_floats(int64_t count) { return std::unique_ptr<float[]>(new float[size_t(count)]); }

// Chooses between one thread and all of them for the steps of a search. All threads are usually faster; but if another
// process occupies a core, each step waits for a thread that is not running. Every period ends with a few steps of the
// other choice, which is adopted if they were faster. The results do not depend on the number of threads.
class ThreadChoice {
 public:
  bool all() const { return all_ != (step_ >= period_ - trial()); }

  // Records the time of a step that used the threads of `all()`.
  void add(double seconds) {
    const bool on_all = all();
    seconds_[on_all] += seconds;
    ++steps_[on_all];
    const double mean = seconds_[all_] / steps_[all_], other = seconds_[!all_] / (steps_[!all_] ? steps_[!all_] : 1);
    const bool hopeless = on_all != all_ && other > HOPELESS * mean;
    if (++step_ < period_ && !hopeless) return;
    if (other < mean) {
      all_ = !all_;
      period_ = SHORTEST;
    } else if (period_ < LONGEST) {
      period_ *= 2;
    }
    step_ = 0;
    seconds_[0] = seconds_[1] = 0;
    steps_[0] = steps_[1] = 0;
  }

 private:
  static constexpr int SHORTEST = 16, LONGEST = 1024;
  // A trial whose steps take this many times as long ends early: beside another process, a step on all threads can take
  // a hundred times as long, because OpenMP's threads spin while they wait.
  static constexpr double HOPELESS = 4;

  // Number of steps. A trial of all threads is longer, because they may by chance run undisturbed for one time slice.
  int trial() const { return all_ ? 2 : 12; }

  bool all_ = true;
  int period_ = SHORTEST, step_ = 0;
  double seconds_[2] = {};  // total in this period, on one thread and on all
  int steps_[2] = {};       // number of steps, likewise
};

thread_local ThreadChoice thread_choice;  // kept between searches, because single sentences have few steps

}  // namespace

// The search for some of the sentences, on one thread if there are several groups.
class SearchGroup {
 public:
  SearchGroup(const Kernels& kernels, const TransformerModel& model, const SearchOptions& options, int threads)
      : kernels_(kernels), model_(model), options_(options), max_threads_(threads) {}

  void add(int64_t number, const SearchSentence& sentence) {
    sentences_.push_back({number, &sentence, options_.size, -std::numeric_limits<double>::infinity(), {}});
  }

  bool run(Clock::time_point deadline) {
    if (starts_.empty()) {
      threads_ = thread_choice.all() ? max_threads_ : 1;
      begin();
    }
    while (valid && rows_.size()) {
      const auto start = Clock::now();
      if (start > deadline) return false;
      const bool chooses = max_threads_ > 1;
      threads_ = chooses && !thread_choice.all() ? 1 : max_threads_;
      step();
      if (chooses) thread_choice.add(std::chrono::duration<double>(Clock::now() - start).count());
    }
    return true;
  }

  bool valid = true;
  std::vector<SearchResult> results;

  // Copies the recorded weights of a result.
  void write_weights(SearchResult& result) const {
    const Stack& s = model_.decoder;
    const int64_t heads = s.groups * s.per_group, steps = int64_t(result.tokens.size()) - 1;
    result.weights.resize(size_t(heads * steps * result.source_length));
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t t = 0; t < steps; ++t) {
        const float* from = weights_[size_t(t)].get() + (result.cached[size_t(t)] * heads + h) * max_source_;
        std::copy_n(from, result.source_length, result.weights.data() + (h * steps + t) * result.source_length);
      }
  }

 private:
  struct Sentence {
    int64_t number;
    const SearchSentence* source;
    int64_t slots;               // hypotheses that may still be extended
    double threshold;            // score that a hypothesis must exceed to be returned
    std::vector<double> scores;  // scores of the finished hypotheses, best first, at most n_best
  };
  struct Row {  // a hypothesis
    int32_t sentence, unknown;
    double total;
  };

  int64_t length() const { return int64_t(counts_.size()); }  // number of tokens fed to the decoder

  void begin() {
    starts_ = {0};
    for (const Sentence& sentence : sentences_) {
      starts_.push_back(starts_.back() + int64_t(sentence.source->tokens.size()));
      max_source_ = std::max(max_source_, int64_t(sentence.source->tokens.size()));
    }
    stride_ = int64_t(options_.start.size());
    const int64_t tokens = starts_.back(), width = model_.encoder.width;
    std::vector<float> x(size_t(tokens * width)), scratch(size_t(tokens * model_.encoder.scratch()));
    for (size_t i = 0; i < sentences_.size(); ++i) {
      const auto& ids = sentences_[i].source->tokens;
      for (size_t t = 0; t < ids.size(); ++t)
        embed(model_.source, ids[t], int64_t(t), width, x.data() + (starts_[i] + int64_t(t)) * width);
    }
    valid = kernels_.encode({&model_.encoder, x.data(), starts_.data(), int64_t(sentences_.size()), scratch.data()},
                            threads_);
    const int64_t key_values = model_.decoder.key_values();
    for (const Stack::Block& block : model_.decoder_blocks) {
      keys_.push_back(allocate_floats(tokens * key_values));
      sources_.push_back(keys_.back().get());
      apply(block.source, x.data(), keys_.back().get(), tokens, width, key_values);
    }
    const auto unknown = int32_t(std::count(options_.start.begin(), options_.start.end(), options_.unknown));
    for (size_t i = 0; i < sentences_.size(); ++i) rows_.push_back({int32_t(i), unknown, 0.0});
    for (size_t r = 0; r < rows_.size(); ++r) {
      tokens_.insert(tokens_.end(), options_.start.begin(), options_.start.end());
      cached_.insert(cached_.end(), size_t(stride_), int32_t(r));
    }
    for (size_t t = 0; valid && t + 1 < options_.start.size(); ++t) decode();
    collect();
  }

  void apply(const Step::Layer& layer, const float* x, float* out, int64_t rows, int64_t depth, int64_t columns) {
    (layer.scales ? kernels_.linear_int8 : kernels_.linear)(
        {x, layer.weight, layer.scales, layer.bias, out, rows, depth, columns}, threads_);
  }

  // Feeds the newest token of each hypothesis to the decoder; its output replaces x_.
  void decode() {
    const Stack& s = model_.decoder;
    const int64_t rows = int64_t(rows_.size()), t = length(), heads = s.groups * s.per_group;
    x_.resize(size_t(rows * s.width));
    scratch_.resize(size_t(rows * s.scratch()));
    sentence_of_row_.resize(rows_.size());
    for (int64_t r = 0; r < rows; ++r) {
      embed(model_.target, tokens_[size_t(r * stride_ + t)], t, s.width, x_.data() + r * s.width);
      sentence_of_row_[size_t(r)] = rows_[size_t(r)].sentence;
    }
    cache_memory_.push_back(allocate_floats(s.layers * rows * s.key_values()));
    caches_.push_back(cache_memory_.back().get());
    counts_.push_back(rows);
    if (options_.recorded >= 0) weights_.push_back(allocate_floats(rows * heads * max_source_));
    Extend e{&s,
             x_.data(),
             rows,
             t,
             caches_.data(),
             counts_.data(),
             cached_.data(),
             stride_,
             sentence_of_row_.data(),
             sources_.data(),
             starts_.data(),
             options_.recorded,
             nullptr,
             max_source_,
             scratch_.data()};
    if (options_.recorded >= 0) e.weights = weights_.back().get();
    valid = valid && kernels_.extend(e, threads_);
  }

  void step() {
    const int64_t rows = int64_t(rows_.size()), vocabulary = model_.vocabulary;
    decode();
    if (!valid) return;
    logits_.resize(size_t(rows * vocabulary));
    apply(model_.output, x_.data(), logits_.data(), rows, model_.decoder.width, vocabulary);
    int64_t slots = 0;
    bool limited = false;  // the unknown token may have to be skipped
    for (const Row& row : rows_) {
      slots = std::max(slots, sentences_[size_t(row.sentence)].slots);
      limited |= sentences_[size_t(row.sentence)].source->max_unknown >= 0;
    }
    const int64_t k = std::min(slots + limited, vocabulary - options_.suppressed);
    values_.resize(size_t(rows * k));
    best_.resize(size_t(rows * k));
    kernels_.best({logits_.data(), values_.data(), best_.data(), rows, vocabulary, options_.suppressed, k}, threads_);
    extend(k);
    collect();
  }

  struct Extension {
    double total;
    int64_t row, token;
  };

  // Keeps the best extensions of each sentence, one per slot. values_, best_: the k best tokens of each row.
  void extend(int64_t k) {
    std::vector<Row> rows;
    std::vector<int32_t> tokens, cached;
    const size_t newest = counts_.size(), stride = newest + 1;  // newest: index of the new token
    for (size_t first = 0, last; first < rows_.size(); first = last) {
      const int32_t number = rows_[first].sentence;
      for (last = first; last < rows_.size() && rows_[last].sentence == number; ++last) {
      }
      choose(first, last, k);
      for (const Extension& e : chosen_) {
        const Row& parent = rows_[size_t(e.row)];
        rows.push_back({number, parent.unknown + (e.token == options_.unknown), e.total});
        const size_t from = size_t(e.row * stride_), to = tokens.size();
        tokens.resize(to + stride);
        cached.resize(to + stride);
        std::copy_n(tokens_.begin() + int64_t(from), newest, tokens.begin() + int64_t(to));
        std::copy_n(cached_.begin() + int64_t(from), newest - 1, cached.begin() + int64_t(to));
        tokens[to + newest] = int32_t(e.token);
        cached[to + newest - 1] = int32_t(e.row);
      }
    }
    rows_.swap(rows);
    tokens_.swap(tokens);
    cached_.swap(cached);
    stride_ = int64_t(stride);
  }

  // Finds the best extensions of rows [first, last), which belong to one sentence. Ties go to the first.
  void choose(size_t first, size_t last, int64_t k) {
    const Sentence& sentence = sentences_[size_t(rows_[first].sentence)];
    const size_t slots = size_t(sentence.slots);
    chosen_.clear();
    for (size_t row = first; row < last; ++row) {
      const bool skips = sentence.source->max_unknown >= 0 && rows_[row].unknown >= sentence.source->max_unknown;
      bool any = false;
      for (int64_t i = 0; i < k; ++i) {
        const size_t at = row * size_t(k) + size_t(i);
        if (skips && best_[at] == options_.unknown) continue;
        const double value = double(values_[at]), total = rows_[row].total + value;
        any |= value > -std::numeric_limits<double>::infinity();
        if (!any) break;  // NaN, or no token is possible
        if (!(total > -std::numeric_limits<double>::infinity())) break;
        if (chosen_.size() == slots && !(total > chosen_.back().total)) break;  // later tokens are worse
        if (chosen_.size() == slots) chosen_.pop_back();
        auto place = chosen_.end();
        while (place != chosen_.begin() && (place - 1)->total < total) --place;
        chosen_.insert(place, {total, int64_t(row), best_[at]});
      }
      if (!any) valid = false;
    }
    while (chosen_.size() && chosen_.back().total < chosen_.front().total - options_.prune_threshold)
      chosen_.pop_back();
  }

  // Stores the hypotheses that ended or reached their limit, and drops those that can no longer be returned.
  void collect() {
    const int64_t n = length();  // tokens after the first start token
    const size_t stride = size_t(stride_);
    std::vector<char> ended(rows_.size()), active(rows_.size());
    for (int finished = 1; finished >= 0; --finished)
      for (size_t r = 0; r < rows_.size(); ++r) {
        Sentence& sentence = sentences_[size_t(rows_[r].sentence)];
        if (finished) ended[r] = n >= int64_t(options_.start.size()) && tokens_[r * stride + size_t(n)] == options_.end;
        if (finished ? ended[r] : !ended[r] && sentence.source->limit <= n) store(r, bool(finished));
      }
    size_t kept = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      const Sentence& sentence = sentences_[size_t(rows_[r].sentence)];
      const double limit = double(std::max<int64_t>(sentence.source->limit, 1));
      // Log probabilities only decrease, so this bounds the score of every continuation.
      const double bound = rows_[r].total / std::pow(limit, options_.length_penalty);
      if (ended[r] || sentence.source->limit <= n || !(bound > sentence.threshold)) continue;
      rows_[kept] = rows_[r];
      if (kept != r) {
        std::copy_n(tokens_.begin() + int64_t(r * stride), n + 1, tokens_.begin() + int64_t(kept * stride));
        std::copy_n(cached_.begin() + int64_t(r * stride), n, cached_.begin() + int64_t(kept * stride));
      }
      ++kept;
    }
    rows_.resize(kept);
  }

  void store(size_t r, bool finished) {
    Sentence& sentence = sentences_[size_t(rows_[r].sentence)];
    const int64_t n = length(), source = int64_t(sentence.source->tokens.size());
    const auto tokens = tokens_.begin() + int64_t(r) * stride_, cached = cached_.begin() + int64_t(r) * stride_;
    results.push_back(
        {sentence.number, rows_[r].total, finished, {tokens, tokens + n + 1}, {cached, cached + n}, source, {}});
    if (!finished) return;
    --sentence.slots;
    auto& scores = sentence.scores;
    const double score = rows_[r].total / std::pow(double(std::max<int64_t>(n, 1)), options_.length_penalty);
    scores.insert(std::upper_bound(scores.begin(), scores.end(), score, std::greater<double>()), score);
    if (int64_t(scores.size()) >= options_.n_best) sentence.threshold = scores[size_t(options_.n_best - 1)];
  }

  const Kernels& kernels_;
  const TransformerModel& model_;
  const SearchOptions& options_;
  const int max_threads_;
  int threads_ = 1;  // for the current step
  std::vector<Sentence> sentences_;
  std::vector<int64_t> starts_;                                          // see `Extend`
  int64_t max_source_ = 0, stride_ = 0;                                  // stride: number of tokens per hypothesis
  std::vector<std::unique_ptr<float[]>> keys_, cache_memory_, weights_;  // keys_: one per layer; others: per token
  std::vector<const float*> sources_;
  std::vector<float*> caches_;
  std::vector<int64_t> counts_;

  std::vector<Row> rows_;                                   // grouped by sentence
  std::vector<int32_t> tokens_, cached_, sentence_of_row_;  // sentence_of_row_: rows; others: rows × stride
  std::vector<float> x_, scratch_, logits_, values_;
  std::vector<int64_t> best_;
  std::vector<Extension> chosen_;
};

Search::Search(const Kernels& kernels, TransformerModel model, SearchOptions options,
               const std::vector<SearchSentence>& sentences, int threads)
    : kernels_(kernels),
      model_(std::move(model)),
      options_(std::move(options)),
      sentences_(sentences),
      threads_(threads) {
  model_.encoder.blocks = model_.encoder_blocks.data();
  model_.decoder.blocks = model_.decoder_blocks.data();
  // Two groups per thread balance the load, but small groups read all parameters for few rows.
  const size_t most = size_t(std::max(threads, 1)), count = sentences_.size();
  const size_t groups = most > 1 && count >= 16 * most ? 2 * most : std::max<size_t>(std::min(count, most), 1);
  for (size_t i = 0; i < groups; ++i)
    groups_.push_back(std::make_unique<SearchGroup>(kernels_, model_, options_, groups == 1 ? threads : 1));
  for (size_t i = 0; i < sentences_.size(); ++i) groups_[i % groups]->add(int64_t(i), sentences_[i]);
}

Search::~Search() = default;

bool Search::run(double seconds) {
  struct Work {
    std::vector<std::unique_ptr<SearchGroup>>& groups;
    Clock::time_point deadline;
    std::vector<char> done;
  };
  Work work{groups_, Clock::now() + std::chrono::microseconds(int64_t(seconds * 1e6)), {}};
  work.done.resize(groups_.size());
  const auto run = [](void* context, int64_t item) {
    Work& w = *static_cast<Work*>(context);
    w.done[size_t(item)] = w.groups[size_t(item)]->run(w.deadline);
  };
  if (groups_.size() == 1)
    run(&work, 0);  // not in a parallel region, so the kernels can use all threads
  else
    parallel(int64_t(groups_.size()), threads_, run, &work);
  return std::all_of(work.done.begin(), work.done.end(), [](char done) { return done; });
}

bool Search::is_valid() const {
  return std::all_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->valid; });
}

std::vector<SearchResult> Search::results() const {
  std::vector<SearchResult> all;
  for (const auto& group : groups_)
    for (SearchResult result : group->results) {
      if (options_.recorded >= 0) group->write_weights(result);
      all.push_back(std::move(result));
    }
  return all;
}

}  // namespace regard
