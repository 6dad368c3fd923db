"""Time of translating one sentence from the shell, including start-up: regard and CTranslate2.

    python -m benchmarks.cold --model FOLDER

Each run is a new process that translates one sentence with beam 5; the runs alternate. CTranslate2 imports
torch where it is installed, for its converters; it is also measured with torch hidden.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SENTENCE = "Zwei Hunde spielen im Schnee."
RUNS = 7
LIMIT = 1.5  # goal: at most this many times CTranslate2's time
_CTRANSLATE2 = """
import sys
folder, text, hide_torch = sys.argv[1:]
if hide_torch == "True":
    sys.modules["torch"] = None
import ctranslate2, sentencepiece
tokens = sentencepiece.SentencePieceProcessor(model_file=folder + "/tokens.model")
translator = ctranslate2.Translator(folder, intra_threads=2)
source = [*map(str, tokens.encode(text)), str(tokens.eos_id())]
result = translator.translate_batch([source], beam_size=5)[0]
print(tokens.decode(list(map(int, result.hypotheses[0]))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cold", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model written by regard train")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"[default: {RUNS}]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as converted:
        regard = [str(Path(sys.executable).with_name("regard")), "translate", SENTENCE, "-m", args.model]
        commands = {"regard": regard, "regard int8": [*regard, "--dtype", "int8"]}
        if importlib.util.find_spec("ctranslate2") is None:
            print("(ctranslate2 is not installed)")
        else:
            _convert(args.model, Path(converted))
            peer = [sys.executable, "-c", _CTRANSLATE2, converted, SENTENCE]
            commands |= {"CTranslate2": [*peer, "False"], "CTranslate2, torch hidden": [*peer, "True"]}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(-1, args.runs):  # the first round fills the file cache
            for name, command in commands.items():
                elapsed, text = _run(command)
                if number < 0:
                    print(f"  {name:28}{text}")
                else:
                    seconds[name].append(elapsed)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        ratios = "".join(
            f"{median / value:8.2f} × {peer}" for peer, value in medians.items() if peer.startswith("CT")
        )
        print(f"  {name:28}{median:6.2f} s{ratios if name.startswith('regard') else ''}", flush=True)


def _run(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return time.perf_counter() - start, result.stdout.strip()


def _convert(model: str, folder: Path) -> None:
    """Write a CTranslate2 model whose tokens are token ids as text, with its SentencePiece model."""
    import shutil

    from benchmarks import converted
    from regard.translation.training.checkpoint import load_model

    loaded, _, _ = load_model(model)
    converted.to_ctranslate2(loaded, folder)  # type: ignore[arg-type]
    shutil.copy(Path(model) / "tokens.model", folder)


if __name__ == "__main__":
    main()
