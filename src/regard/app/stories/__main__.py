"""Train the language model of the page: python -m regard.app.stories FOLDER."""

import argparse
import time

import torch

from regard.app.stories.training import train_stories

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m regard.app.stories", description=__doc__)
    parser.add_argument("folder", help="Where to save the model.")
    parser.add_argument("--updates", type=int, default=4000, help="Optimizer updates. [default: 4000]")
    parser.add_argument("--seed", type=int, default=0, help="Random seed. [default: 0]")
    arguments = parser.parse_args()
    start = time.monotonic()
    model, loss = train_stories(arguments.updates, arguments.seed, progress=True)
    model.save(arguments.folder)
    print(
        f"{model} in {time.monotonic() - start:.0f} s on {torch.get_num_threads()} threads, loss {loss:.3f}"
    )
