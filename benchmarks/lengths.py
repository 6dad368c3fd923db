"""BLEU by sentence length: without attention a sentence must fit into one vector, whatever its length.

Three models learn dates, times and numbers in words, nearly always up to four of them in a sentence and in
one sentence of twenty more, and translate sentences of up to twelve that were held out (Bahdanau et al. 2015,
figure 2; Cho et al. 2014).

    python -m benchmarks.lengths [--folder lengths] [--epochs 6] [--output lengths.png]
"""

import argparse
from pathlib import Path

from regard.plot.curves import draw_by_length
from regard.translation import Greedy, TranslationConfig, by_length, embedded_corpus, load_translator, train
from regard.translation.evaluation import length_bins
from regard.translation.training.progress import create_display

NAMES = {"plain": "plain (LSTM)", "recurrent": "Bahdanau's attention", "transformer": "Transformer"}
MORE = {"transformer": 3}  # times as many epochs, which go faster
# positions that say how far words are apart mean the same in sentences of any length
SETTINGS = ["tokens.kind=bpe", "tokens.size=300", "model.positions=t5"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lengths", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("lengths"), help="for the models")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("lengths.png"))
    asked = parser.parse_args()
    corpus = embedded_corpus(values=(1, 4))
    pairs = [*corpus.train, *embedded_corpus(values=(5, 12), size=len(corpus.train) // 20).train]
    test = [*corpus.test, *corpus.longer]
    sources, references = [pair.source for pair in test], [pair.target for pair in test]
    longest = max(len(pair.source.split()) for pair in corpus.train)
    print(f"19 of 20 sentences of the training have at most {longest} words")
    bins = length_bins(sources)
    curves = {}
    for kind, name in NAMES.items():
        epochs = asked.epochs * MORE.get(kind, 1)
        config = TranslationConfig.preset("tiny", kind).override([*SETTINGS, f"training.epochs={epochs}"])
        folder = asked.folder / kind
        train(folder, pairs, dev=corpus.dev, config=config, resume=True, callbacks=[create_display()])
        written = [one.text for one in load_translator(folder).translate(sources, strategy=Greedy())]
        curves[name] = by_length(written, references, sources, bins=bins)
        print(name)
        for one in curves[name]:
            about = f"{one.lengths!s:>8} words  {one.sentences:5} sentences"
            print(f"  {about}  BLEU {one.bleu:5.1f}  exact {one.exact:.1%}", flush=True)
    draw_by_length(
        curves, asked.output, title=f"19 of 20 sentences of the training have at most {longest} words"
    )


if __name__ == "__main__":
    main()
