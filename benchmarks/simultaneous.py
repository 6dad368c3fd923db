"""Simultaneous translation: average lagging (Ma et al. 2019) against BLEU, by lag, on Multi30k test2016.

python -m benchmarks.simultaneous FOLDER [--sentences 200] [--lags 0 1 2 3 5 inf]
"""

import argparse
import time
from itertools import islice

from benchmarks.multi30k import FOLDER
from regard.translation import (
    average_lagging,
    evaluate,
    load_translator,
    read_pairs,
    translate_simultaneously,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.simultaneous", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="a German-English model folder")
    parser.add_argument("--sentences", type=int, default=200, help="test sentences [default: 200]")
    parser.add_argument("--lags", type=float, nargs="+", default=[0, 1, 2, 3, 5, float("inf")])
    args = parser.parse_args()
    translator = load_translator(args.folder)
    files = [FOLDER / f"test_2016_flickr.{language}" for language in ("de", "en")]
    pairs = list(islice(read_pairs(*files), args.sentences))
    print("| lag | average lagging | BLEU | seconds per sentence |\n|---|---|---|---|")
    for lag in args.lags:
        texts, lagging, start = [], [], time.process_time()
        for pair in pairs:
            words = pair.source.split()
            emissions = list(translate_simultaneously(translator, words, lag=lag))
            texts.append(" ".join(emission.text for emission in emissions))
            read = [emission.words_read for emission in emissions for _ in emission.text.split()]
            if read:
                lagging.append(average_lagging(read, len(words)))
        bleu = evaluate(texts, [pair.target for pair in pairs]).bleu
        seconds = (time.process_time() - start) / len(pairs)
        print(
            f"| {lag:g} | {sum(lagging) / max(len(lagging), 1):.2f} | {bleu:.1f} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
