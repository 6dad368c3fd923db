"""Where benchmarks find corpora that are not part of this repository.

By default the folder shared/data next to the repository; REGARD_DATA names another one. It is laid out as

    multi30k/   {train,val,test_2016_flickr}.{en,de}   Multi30k task 1, raw text: github.com/multi30k/dataset
    tatoeba/    {train,dev,test}.en-de.tsv             English-German pairs: manythings.org/anki
    wic/        {train,dev}/*.{data,gold}.txt          Word-in-Context 1.0: pilehvar.github.io/wic

Without them, a benchmark says what it used instead, or which path it looked for.
"""

import os
from pathlib import Path

DATA = Path(os.environ.get("REGARD_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
