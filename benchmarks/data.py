"""Location of the corpora that are not part of this repository.

Default: the folder shared/data next to the repository. Set REGARD_DATA to use another one. Its contents:

    multi30k/   {train,val,test_2016_flickr}.{en,de}   Multi30k task 1, raw text: github.com/multi30k/dataset
    tatoeba/    {train,dev,test}.en-de.tsv             English-German pairs: manythings.org/anki
    wic/        {train,dev}/*.{data,gold}.txt          Word-in-Context 1.0: pilehvar.github.io/wic

If a corpus is missing, a benchmark reports the substitute it uses or the path it expected.
"""

import os
from pathlib import Path

DATA = Path(os.environ.get("REGARD_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
