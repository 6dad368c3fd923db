"""BLEU by sentence length, with and without attention.

Without attention, a sentence of any length must fit into one vector. Three models are trained on dates, times
and numbers in words: 95% of the training sentences contain up to four such values, the others 5 to 12. The
test sentences are held out and contain up to 12 (Bahdanau et al. 2015, figure 2; Cho et al. 2014).

    python -m benchmarks.lengths [--folder lengths] [--epochs 6] [--output lengths.png]
"""

import argparse
from pathlib import Path

from regard.plot.curves import draw_by_length
from regard.translation import Greedy, TranslationConfig, by_length, embedded_corpus, load_translator, train
from regard.translation.evaluation import length_bins
from regard.translation.training.progress import create_display

NAMES = {"plain": "plain (LSTM)", "recurrent": "Bahdanau's attention", "transformer": "Transformer"}
EPOCH_FACTOR = {"transformer": 3}  # the Transformer's epochs are faster
# T5 positions are relative, so they generalize to longer sentences
SETTINGS = ["tokens.kind=bpe", "tokens.size=300", "model.positions=t5"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lengths", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("lengths"), help="folder for the models [default: lengths]"
    )
    parser.add_argument("--epochs", type=int, default=6, help="training epochs [default: 6]")
    parser.add_argument(
        "--output", type=Path, default=Path("lengths.png"), help="plot [default: lengths.png]"
    )
    args = parser.parse_args()
    corpus = embedded_corpus(values=(1, 4))
    pairs = [*corpus.train, *embedded_corpus(values=(5, 12), size=len(corpus.train) // 20).train]
    test = [*corpus.test, *corpus.longer]
    sources, references = [pair.source for pair in test], [pair.target for pair in test]
    longest = max(len(pair.source.split()) for pair in corpus.train)
    title = f"95% of the training sentences have at most {longest} words"
    print(title)
    bins = length_bins(sources)
    curves = {}
    for kind, name in NAMES.items():
        epochs = args.epochs * EPOCH_FACTOR.get(kind, 1)
        config = TranslationConfig.preset("tiny", kind).override([*SETTINGS, f"training.epochs={epochs}"])
        folder = args.folder / kind
        train(folder, pairs, dev=corpus.dev, config=config, resume=True, callbacks=[create_display()])
        translations = load_translator(folder).translate(sources, strategy=Greedy())
        outputs = [translation.text for translation in translations]
        curves[name] = by_length(outputs, references, sources, bins=bins)
        print(name)
        for score in curves[name]:
            label = f"{score.lengths!s:>8} words  {score.sentences:5} sentences"
            print(f"  {label}  BLEU {score.bleu:5.1f}  exact {score.exact:.1%}", flush=True)
    draw_by_length(curves, args.output, title=title)


if __name__ == "__main__":
    main()
