// Beam search with a Transformer, from source tokens to hypotheses. The kernels do the arithmetic; this code does the
// bookkeeping, and is compiled for any processor. It gives the same results as translation/decoding/search.py, up to
// rounding.
//
// The sentences are divided into groups, one per thread, which share nothing but the parameters. Keys and values are
// never moved: each hypothesis stores where those of its earlier tokens are.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "abi.h"

namespace regard {

// Parameters of an encoder-decoder Transformer. The tensors belong to the caller.
struct TransformerModel {
  // Embeddings: token · scale + position.
  struct Embedding {
    const float *tokens, *positions;  // positions: a table with enough rows
    float scale;
  };
  Stack encoder, decoder;
  std::vector<Stack::Block> encoder_blocks, decoder_blocks;
  Embedding source, target;
  Step::Layer output;
  int64_t vocabulary;
};

struct SearchOptions {
  int64_t size, n_best;  // beam size, and results per sentence
  double length_penalty, prune_threshold;
  int64_t suppressed, end, unknown;  // tokens below `suppressed` are never generated
  std::vector<int64_t> start;        // the tokens that start every target
  int64_t recorded;                  // the decoder layer whose cross-attention weights to record, or −1
};

struct SearchSentence {
  std::vector<int64_t> tokens;
  int64_t limit;        // maximum number of tokens after the first start token
  int64_t max_unknown;  // maximum number of unknown tokens, or −1
};

struct SearchResult {
  int64_t sentence;
  double total;  // log probability
  bool finished;
  std::vector<int32_t> tokens;  // including the start tokens
  std::vector<int32_t> cached;  // see `Extend`
  int64_t source_length;
  std::vector<float> weights;  // heads × (tokens − 1) × source_length, if recorded
};

class SearchGroup;

class Search {
 public:
  Search(const Kernels& kernels, TransformerModel model, SearchOptions options,
         const std::vector<SearchSentence>& sentences, int threads);
  ~Search();
  Search(const Search&) = delete;

  // Continues for about `seconds`. Returns whether the search has ended.
  bool run(double seconds);
  // False if a result is infinite or NaN, or if every token of a row has probability 0; the results are then invalid.
  bool is_valid() const;
  // All completed hypotheses of all sentences, in the order in which they were completed.
  std::vector<SearchResult> results() const;

 private:
  const Kernels& kernels_;
  TransformerModel model_;
  SearchOptions options_;
  std::vector<SearchSentence> sentences_;
  std::vector<std::unique_ptr<SearchGroup>> groups_;
  int threads_;
};

}  // namespace regard
